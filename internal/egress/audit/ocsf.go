package audit

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"time"
)

// The version of OCSF that lines are in, and what they say made them.
const (
	ocsfVersion = "1.5.0"
	product     = "Cloche"
)

// The classes of OCSF that are used.
const (
	classNetwork = 4001
	classHTTP    = 4002
	classDNS     = 4003
)

// event is one line: an OCSF event of category 4 (network activity). What OCSF
// has no word for stands in unmapped.
type event struct {
	Metadata     metadata    `json:"metadata"`
	CategoryUID  int         `json:"category_uid"`
	ClassUID     int         `json:"class_uid"`
	ActivityID   int         `json:"activity_id"`
	TypeUID      int         `json:"type_uid"`
	SeverityID   int         `json:"severity_id"`
	Time         int64       `json:"time"`    // milliseconds
	TimeDT       time.Time   `json:"time_dt"` // as exact as it is known
	Duration     int64       `json:"duration"`
	StatusID     int         `json:"status_id"`
	StatusCode   string      `json:"status_code,omitempty"` // the reason
	ActionID     int         `json:"action_id"`
	Disposition  int         `json:"disposition_id"`
	Policy       policy      `json:"policy"`
	FirewallRule *named      `json:"firewall_rule,omitempty"`
	Src          endpoint    `json:"src_endpoint"`
	Dst          *endpoint   `json:"dst_endpoint,omitempty"`
	Query        *dnsQuery   `json:"query,omitempty"`
	Request      *request    `json:"http_request,omitempty"`
	Response     *httpAnswer `json:"http_response,omitempty"`
	Traffic      traffic     `json:"traffic"`
	Unmapped     unmapped    `json:"unmapped"`
}

type metadata struct {
	Version  string   `json:"version"`
	UID      string   `json:"uid"`
	Product  named    `json:"product"`
	Profiles []string `json:"profiles"`
	Tenant   string   `json:"tenant_uid"` // the project
}

type named struct {
	Name   string `json:"name"`
	Vendor string `json:"vendor_name,omitempty"`
}

type policy struct {
	Name    string `json:"name"`
	Version string `json:"version"`
}

type endpoint struct {
	UID      string `json:"uid,omitempty"` // of the source: the sandbox
	Hostname string `json:"hostname,omitempty"`
	IP       string `json:"ip,omitempty"`
	Port     uint16 `json:"port,omitempty"`
}

type dnsQuery struct {
	Hostname string `json:"hostname"`
	Type     string `json:"type,omitempty"`
}

type request struct {
	Method string `json:"http_method"`
	URL    url    `json:"url"`
}

type url struct {
	Scheme string `json:"scheme"`
	Host   string `json:"hostname"`
	Path   string `json:"path"`
}

type httpAnswer struct {
	Code int `json:"code"`
}

type traffic struct {
	In      int64  `json:"bytes_in"`
	Out     int64  `json:"bytes_out"`
	Packets uint64 `json:"packets,omitempty"`
}

// unmapped is what a Record has beyond OCSF. Dialled is here because the
// destination of an event is what was connected to in the end.
type unmapped struct {
	Kind      Kind           `json:"kind"`
	Verdict   Verdict        `json:"verdict"`
	WouldDeny bool           `json:"would_deny,omitempty"`
	Dialled   netip.AddrPort `json:"dialled,omitzero"`
	Scheme    string         `json:"scheme,omitempty"`
	Method    string         `json:"method,omitempty"` // of a question: its type
	Injected  []string       `json:"injected,omitempty"`
	Nanos     int64          `json:"duration_ns"`
}

// httpActivities are OCSF's numbers of methods; another is 99.
var httpActivities = map[string]int{
	"CONNECT": 1, "DELETE": 2, "GET": 3, "HEAD": 4, "OPTIONS": 5, "POST": 6, "PUT": 7, "TRACE": 8, "PATCH": 9,
}

// class is an event's class and activity.
func (r *Record) class() (class, activity int) {
	switch r.Kind {
	case DNS:
		return classDNS, 1 // query
	case HTTP:
		if n, ok := httpActivities[r.Method]; ok {
			return classHTTP, n
		}
		return classHTTP, 99
	case Packet:
		return classNetwork, 6 // traffic
	default:
		switch r.Verdict {
		case Denied:
			return classNetwork, 5 // refuse
		case Failed:
			return classNetwork, 4 // fail
		}
		return classNetwork, 1 // open
	}
}

// Encode is an entry as one line of OCSF, without its end.
func Encode(e Entry) ([]byte, error) {
	class, activity := e.class()
	v := event{
		Metadata: metadata{
			Version: ocsfVersion, UID: strconv.FormatUint(e.ID, 10), Product: named{Name: product, Vendor: product},
			Profiles: []string{"datetime", "security_control"}, Tenant: e.Project,
		},
		CategoryUID: 4, ClassUID: class, ActivityID: activity, TypeUID: class*100 + activity,
		Time: e.At.UnixMilli(), TimeDT: e.At, Duration: e.Duration.Milliseconds(), StatusCode: e.Reason,
		Policy:  policy{Name: e.Profile, Version: strconv.FormatInt(e.Version, 10)},
		Src:     endpoint{UID: e.Sandbox},
		Traffic: traffic{In: e.Received, Out: e.Sent, Packets: e.Count},
		Unmapped: unmapped{
			Kind: e.Kind, Verdict: e.Verdict, WouldDeny: e.WouldDeny, Dialled: e.Dialled, Scheme: e.Scheme, Method: e.Method,
			Injected: e.Injected, Nanos: int64(e.Duration),
		},
	}
	v.SeverityID, v.StatusID, v.ActionID, v.Disposition = e.outcome()
	if e.Rule != "" {
		v.FirewallRule = &named{Name: e.Rule}
	}
	dst := endpoint{Hostname: e.Host}
	if at := e.Upstream; at.IsValid() {
		dst.IP, dst.Port = at.Addr().String(), at.Port()
	}
	if dst != (endpoint{}) {
		v.Dst = &dst
	}
	switch class {
	case classDNS:
		v.Query = &dnsQuery{Hostname: e.Host, Type: e.Method}
	case classHTTP:
		v.Request = &request{Method: e.Method, URL: url{Scheme: e.Scheme, Host: e.Host, Path: e.Path}}
	}
	if e.Status != 0 {
		v.Response = &httpAnswer{Code: e.Status}
	}
	return json.Marshal(v)
}

// outcome is the verdict in OCSF's numbers: informational or low, success or
// failure, allowed or denied, allowed or blocked (or what was only logged, or
// failed).
func (r *Record) outcome() (severity, status, action, disposition int) {
	switch {
	case r.Verdict == Denied && r.Kind == Packet:
		return 2, 2, 2, 6 // dropped
	case r.Verdict == Denied:
		return 2, 2, 2, 2
	case r.Verdict == Failed:
		return 1, 2, 1, 27
	case r.WouldDeny:
		return 2, 1, 1, 17
	}
	return 1, 1, 1, 1
}

// Decode reads what Encode wrote.
func Decode(line []byte) (Entry, error) {
	var v event
	if err := json.Unmarshal(line, &v); err != nil {
		return Entry{}, fmt.Errorf("decode an audit line: %w", err)
	}
	id, err := strconv.ParseUint(v.Metadata.UID, 10, 64)
	if err != nil || v.Metadata.Product.Name != product {
		return Entry{}, errors.New("decode an audit line: it is none of Cloche's")
	}
	version, _ := strconv.ParseInt(v.Policy.Version, 10, 64)
	e := Entry{ID: id, Record: Record{
		At: v.TimeDT, Sandbox: v.Src.UID, Project: v.Metadata.Tenant, Profile: v.Policy.Name, Version: version,
		Kind: v.Unmapped.Kind, Verdict: v.Unmapped.Verdict, WouldDeny: v.Unmapped.WouldDeny, Reason: v.StatusCode,
		Dialled: v.Unmapped.Dialled, Scheme: v.Unmapped.Scheme, Method: v.Unmapped.Method, Injected: v.Unmapped.Injected,
		Sent: v.Traffic.Out, Received: v.Traffic.In, Duration: time.Duration(v.Unmapped.Nanos), Count: v.Traffic.Packets,
	}}
	if v.FirewallRule != nil {
		e.Rule = v.FirewallRule.Name
	}
	if v.Dst != nil {
		e.Host = v.Dst.Hostname
		if a, err := netip.ParseAddr(v.Dst.IP); err == nil {
			e.Upstream = netip.AddrPortFrom(a, v.Dst.Port)
		}
	}
	if v.Request != nil {
		e.Path = v.Request.URL.Path
	}
	if v.Response != nil {
		e.Status = v.Response.Code
	}
	return e, nil
}
