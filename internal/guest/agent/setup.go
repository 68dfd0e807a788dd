package agent

import (
	"context"
	"os"
	"regexp"
	"strings"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"cloche.dev/cloche/internal/guest/wire"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	hostsFile    = "/etc/hosts"
	hostnameFile = "/etc/hostname"
	hostsMark    = "# cloche"
	clockSlack   = time.Second
)

var (
	hostnameForm  = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	machineIDForm = regexp.MustCompile(`^[0-9a-f]{32}$`)
	bootIDForm    = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
)

// Setup implements the service. The supervisor keeps what it brings, so that
// an agent that restarts has it before the host says it again; it replaces the
// setup before wholly. The generation is told last of all, and after it the
// hooks are run; what Freeze held goes on between the two.
func (a *Agent) Setup(ctx context.Context, req *connect.Request[guestv1.SetupRequest]) (*connect.Response[guestv1.SetupResponse], error) {
	m := req.Msg
	if err := checkSetup(m); err != nil {
		return nil, err
	}
	a.setting.Lock()
	defer a.setting.Unlock()
	kept := proto.CloneOf(m)
	problems := a.setWayOut(kept)
	kept.Entropy, kept.CaPem, kept.TrustP12, kept.RootsPem = nil, nil, nil, nil // nobody asks for them again
	blob, err := proto.Marshal(kept)
	if err != nil {
		return nil, err
	}
	if err := a.keep(ctx, func(s *wire.State) { s.Setup, s.MaxProcs = blob, m.GetMaxProcsPerUser() }); err != nil {
		return nil, err
	}
	a.mu.Lock()
	a.setup = kept
	a.mu.Unlock()
	a.addEntropy(m.GetEntropy())
	a.setClock(m.GetClockUnixNano())
	a.setHostname(m.GetHostname())
	a.setMachineID(m.GetMachineId())
	a.setBootID(m.GetBootId())
	a.setGeneration(m.GetGeneration())
	a.freezer.thaw()
	return connect.NewResponse(&guestv1.SetupResponse{Hooks: a.runHooks(ctx, kept), Problems: problems}), nil
}

func checkSetup(m *guestv1.SetupRequest) error {
	for _, f := range []struct {
		name, value string
		form        *regexp.Regexp
	}{
		{"hostname", m.GetHostname(), hostnameForm}, {"machine_id", m.GetMachineId(), machineIDForm}, {"boot_id", m.GetBootId(), bootIDForm},
	} {
		if f.value != "" && !f.form.MatchString(f.value) {
			return sandbox.Errorf(sandbox.Invalid, "bad_"+f.name, "%q is no %s", f.value, f.name)
		}
	}
	if err := checkEnv(map[string]string{"source": m.GetSource()}); err != nil {
		return err
	}
	if err := checkWayOut(m); err != nil {
		return err
	}
	return checkEnv(m.GetEnv())
}

// setClock corrects the clock where the kernel lets us; under gVisor the
// clock is the host's and needs no correction.
func (a *Agent) setClock(nano int64) {
	off := time.Until(time.Unix(0, nano))
	if nano == 0 || off.Abs() < clockSlack {
		return
	}
	ts := unix.NsecToTimespec(nano)
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		a.cfg.Log.Warn("the clock can't be set", "off_by", off, "error", err)
	}
}

// setHostname sets the name where the kernel lets us, and the files that name
// it. A template without these files, or with read-only ones, is no reason to
// fail.
func (a *Agent) setHostname(name string) {
	if name == "" {
		return
	}
	if now, err := os.Hostname(); err != nil || now != name {
		if err := unix.Sethostname([]byte(name)); err != nil {
			a.cfg.Log.Warn("the host name can't be set", "error", err)
		}
	}
	for file, content := range map[string]string{hostnameFile: name + "\n", hostsFile: hostsContent(readSmall(hostsFile), name)} {
		if readSmall(file) == content {
			continue
		}
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			a.cfg.Log.Warn("the host name can't be written", "file", file, "error", err)
		}
	}
}

func readSmall(file string) string {
	st, err := os.Stat(file)
	if err != nil || !st.Mode().IsRegular() || st.Size() > 64<<10 {
		return ""
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	return string(b)
}

// hostsContent returns old with one line of ours for name, and with localhost.
func hostsContent(old, name string) string {
	var b strings.Builder
	if !strings.Contains(old, "localhost") {
		b.WriteString("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")
	}
	for line := range strings.Lines(old) {
		if !strings.Contains(line, hostsMark) {
			b.WriteString(strings.TrimRight(line, "\n") + "\n")
		}
	}
	b.WriteString("127.0.1.1\t" + name + " " + hostsMark + "\n")
	return b.String()
}
