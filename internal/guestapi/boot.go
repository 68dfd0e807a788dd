package guestapi

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

// What a virtual machine's root filesystem is made of.
const (
	RootDisk = "disk" // the first drive is the template, the second the sandbox's own disk
	RootNone = "none" // no drive: an empty filesystem in memory, which does for a probe
)

const (
	// MaxBootLine bounds a kernel command line with a Boot in it, in bytes:
	// kernels take 2048 with their terminating zero.
	MaxBootLine = 2000
	// MaxBootReport bounds a boot report, in bytes.
	MaxBootReport = 2048

	bootKey      = "cloche="
	maxBootProcs = 1 << 22 // more than any kernel has pids
	maxMemory    = 1 << 50
)

var (
	bootDialForm = regexp.MustCompile(`^vsock:[0-9]{1,10}:[0-9]{1,10}$`)
	bootHostForm = regexp.MustCompile(`^[A-Za-z0-9.-]{0,64}$`)
)

// Boot is what the kernel command line of a virtual machine tells /init, the
// guest binary, before there is anything else that it could be told by.
type Boot struct {
	Dial     string            `json:"dial"`      // where the agent dials the host: "vsock:CID:PORT"
	Report   uint32            `json:"boot"`      // the host's vsock port that takes the boot report
	Hostname string            `json:"hostname"`  // at most 64 letters, digits, dots and dashes; "" leaves the kernel's
	MaxProcs int               `json:"max_procs"` // RLIMIT_NPROC of every user
	Env      map[string]string `json:"env"`       // environment of PID 1, beside PATH and where to dial
	Root     string            `json:"root"`      // RootDisk or RootNone
	Memory   int64             `json:"memory"`    // bytes that the machine was given
}

// Arg returns the word of the kernel command line that says b. Nothing in it
// needs quoting.
func (b Boot) Arg() (string, error) {
	if err := b.check(); err != nil {
		return "", err
	}
	text, err := json.Marshal(b)
	if err != nil {
		return "", err
	}
	arg := bootKey + base64.RawURLEncoding.EncodeToString(text)
	if len(arg) > MaxBootLine {
		return "", fmt.Errorf("the boot parameters have %d bytes; a kernel command line takes %d", len(arg), MaxBootLine)
	}
	return arg, nil
}

// ParseBoot finds the one such word in a kernel command line.
func ParseBoot(cmdline string) (Boot, error) {
	var b Boot
	if len(cmdline) > 2*MaxBootLine {
		return b, fmt.Errorf("the kernel command line has %d bytes", len(cmdline))
	}
	word := ""
	for _, f := range strings.Fields(cmdline) {
		if v, ok := strings.CutPrefix(f, bootKey); ok {
			if word != "" {
				return b, errors.New("the kernel command line says cloche= twice")
			}
			word = v
		}
	}
	if word == "" {
		return b, errors.New("the kernel command line says no cloche=")
	}
	text, err := base64.RawURLEncoding.Strict().DecodeString(strings.TrimRight(word, "="))
	if err != nil {
		return b, fmt.Errorf("cloche= in the kernel command line: %w", err)
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&b); err != nil {
		return Boot{}, fmt.Errorf("cloche= in the kernel command line: %w", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return Boot{}, errors.New("cloche= in the kernel command line: something follows it")
	}
	if err := b.check(); err != nil {
		return Boot{}, err
	}
	return b, nil
}

func (b Boot) check() error {
	switch {
	case !bootDialForm.MatchString(b.Dial):
		return fmt.Errorf("the agent can't dial %q from a virtual machine", b.Dial)
	case b.Report == 0 || b.Report == math.MaxUint32: // VMADDR_PORT_ANY
		return fmt.Errorf("%d is no port for the boot report", b.Report)
	case !bootHostForm.MatchString(b.Hostname):
		return fmt.Errorf("%q is no host name", b.Hostname)
	case b.MaxProcs < 1 || b.MaxProcs > maxBootProcs:
		return fmt.Errorf("a machine can't have %d processes", b.MaxProcs)
	case b.Root != RootDisk && b.Root != RootNone:
		return fmt.Errorf("%q is no kind of root", b.Root)
	case b.Memory < 1<<20 || b.Memory > maxMemory:
		return fmt.Errorf("a machine can't have %d bytes of memory", b.Memory)
	}
	for k, v := range b.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return fmt.Errorf("%q is no environment variable", k)
		}
	}
	return nil
}

type bootReport struct {
	OK    bool   `json:"ok,omitempty"`
	Error string `json:"error,omitempty"`
}

// BootReport returns the line that /init tells the host: that it is about to
// start the supervisor, or why it can't.
func BootReport(failure error) []byte {
	r := bootReport{OK: failure == nil}
	if failure != nil {
		r.Error = clean(failure.Error())
	}
	line, err := json.Marshal(r)
	for err == nil && len(line) >= MaxBootReport { // escapes may take six bytes for one
		r.Error = strings.ToValidUTF8(r.Error[:len(r.Error)/2], "")
		line, err = json.Marshal(r)
	}
	if err != nil {
		line = []byte(`{"error":"the boot failed"}`) // can't be: strings always encode
	}
	return append(line, '\n')
}

// ReadBootReport reads that line from a machine, which may be hostile: an
// image's or a kernel's maker can make it say anything. It is nil when the
// supervisor is about to start, and else a FailedPrecondition
// "machine_not_booted". The caller sets the connection's deadline.
func ReadBootReport(conn io.Reader) error {
	line := make([]byte, 0, 256)
	buf := make([]byte, 256)
	for !bytes.ContainsRune(line, '\n') {
		n, err := conn.Read(buf)
		if line = append(line, buf[:n]...); len(line) > MaxBootReport {
			return notBooted("its boot report is too long")
		}
		if err != nil && !bytes.ContainsRune(line, '\n') {
			return notBooted("its boot report ended early: " + clean(err.Error()))
		}
	}
	line, _, _ = bytes.Cut(line, []byte("\n"))
	var r bootReport
	switch err := json.Unmarshal(line, &r); {
	case err != nil:
		return notBooted("its boot report is malformed")
	case r.Error != "":
		return notBooted(clean(r.Error))
	case !r.OK:
		return notBooted("its boot report says nothing")
	}
	return nil
}

func notBooted(why string) error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "machine_not_booted", "the machine can't start: %s", why)
}
