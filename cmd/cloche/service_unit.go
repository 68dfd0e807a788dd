package main

import (
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"text/template"
	"time"
)

// unit is what a systemd unit for the daemon is made of.
type unit struct {
	exe              string
	stateDir, runDir string
	serve            []string // flags of serve, --state-dir apart
	url              string   // at which the daemon of this unit answers
	drain            time.Duration
}

// unitText is the unit. Nothing in it may make a mount namespace (Private…=,
// Protect…=, ReadOnly…Paths= and the like, DynamicUser=, RootDirectory=): machines
// outlive the daemon, and the mounts that they were made with must be there for
// the next one.
var unitText = template.Must(template.New("unit").Parse(`# Written by "cloche service install", which writes it anew: put changes into a drop-in (systemctl edit {{.Name}}).
[Unit]
Description=Cloche: isolated machines for untrusted code
# The egress gateway asks the host's name servers, which some hosts learn late.
Wants=network-online.target
After=network-online.target
RequiresMountsFor={{.StateDir}}
StartLimitIntervalSec=60
StartLimitBurst=10

[Service]
Type=notify
ExecStart={{.Start}}
# Only where the host itself goes down: machines outlive a stop or restart of this unit.
ExecStop={{.Stop}}
# Machines and their engine are children of this unit's processes and stay.
KillMode=process
Delegate=yes
OOMPolicy=continue
TasksMax=infinity
LimitNOFILE=1048576
{{- if .RuntimeDir}}
RuntimeDirectory={{.RuntimeDir}}
RuntimeDirectoryMode=0700
RuntimeDirectoryPreserve=yes
{{- end}}
UMask=0077
Restart=always
RestartSec=1
# A command line that means nothing will not mean more the next time.
RestartPreventExitStatus=1
TimeoutStartSec=300
TimeoutStopSec={{.StopSeconds}}

[Install]
WantedBy=multi-user.target
`))

// text is the unit's file.
func (u unit) text(name string) (string, error) {
	var b strings.Builder
	state := "--state-dir=" + u.stateDir
	err := unitText.Execute(&b, map[string]any{
		"Name":     name,
		"StateDir": quoteSpecifiers(quoteWord(u.stateDir)),
		"Start":    execLine(append([]string{u.exe, "serve", state}, u.serve...)),
		"Stop": execLine([]string{
			u.exe, "drain", state, "--url=" + u.url, "--within=" + u.drain.String(), "--if-host-stops",
		}),
		"RuntimeDir":  u.runtimeDir(),
		"StopSeconds": int((u.drain + 2*drainMargin).Seconds()),
	})
	return b.String(), err
}

// runtimeDir is the run directory as systemd wants it named, or "" where that
// does not lie below /run: then the daemon makes it.
func (u unit) runtimeDir() string {
	rel, err := filepath.Rel("/run", u.runDir)
	if err != nil || rel == "." || !filepath.IsLocal(rel) {
		return ""
	}
	return quoteSpecifiers(quoteWord(rel))
}

// execLine writes arguments as systemd reads them.
func execLine(args []string) string {
	words := make([]string, len(args))
	for i, arg := range args {
		word := quoteSpecifiers(quoteWord(arg))
		if i > 0 { // systemd replaces no variables in the program's name
			word = strings.ReplaceAll(word, "$", "$$")
		}
		words[i] = word
	}
	return strings.Join(words, " ")
}

func quoteSpecifiers(s string) string { return strings.ReplaceAll(s, "%", "%%") }

// quoteWord quotes what systemd would split or take for a sign.
func quoteWord(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:=@+,%$[]") == "" {
		return s
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}

// daemonURL is where the daemon that listens so answers on its own host.
func daemonURL(listen string, tls bool) (string, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil || port == "" || port == "0" {
		return "", usage("--listen must be like 127.0.0.1:7070, not %q", listen)
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
		if ip != nil && ip.To4() == nil {
			host = "::1"
		}
	}
	u := url.URL{Scheme: "http", Host: net.JoinHostPort(host, port)}
	if tls {
		u.Scheme = "https"
	}
	return u.String(), nil
}

// changes lists the lines in which two units differ.
func changes(before, after string) []string {
	had, has := lines(before), lines(after)
	var list []string
	for _, l := range strings.Split(before, "\n") {
		if l != "" && !has[l] {
			list = append(list, "- "+l)
		}
	}
	for _, l := range strings.Split(after, "\n") {
		if l != "" && !had[l] {
			list = append(list, "+ "+l)
		}
	}
	if len(list) == 0 && before != after {
		list = append(list, fmt.Sprintf("the order of its %d lines", len(has)))
	}
	return list
}

func lines(text string) map[string]bool {
	m := map[string]bool{}
	for _, l := range strings.Split(text, "\n") {
		m[l] = true
	}
	return m
}
