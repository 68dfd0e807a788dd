package main

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"cloche.dev/cloche/api"
)

// program runs the program in this process and returns what it said.
func program(t *testing.T, args ...string) (code int, out, errOut string) {
	t.Helper()
	files := make([]*os.File, 2)
	for i := range files {
		f, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		files[i] = f
	}
	in, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	code = run(args, in, files[0], files[1])
	said := make([]string, 2)
	for i, f := range files {
		b, err := os.ReadFile(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		said[i] = string(b)
	}
	return code, said[0], said[1]
}

// fakeSystemctl puts a systemctl in PATH that answers as a script says.
func fakeSystemctl(t *testing.T, script string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "systemctl"), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

var units = map[string][]string{
	"plain": nil,
	"all": {
		"--listen", "[::]:443", "--run-dir", "/srv/run of cloche", "--state-dir", `/srv/50% of "it"`, "--tls-cert", "/srv/$c.pem", "--tls-key", "/srv/k.pem",
		"--metrics", "127.0.0.1:7071", "--memory-overcommit", "1.5", "--cpu-overcommit", "2", "--disk-floor", "64", "--driver", "firecracker", "--allow-vulnerable", "1.12.1",
		"--egress-open", "10.1.0.0/16,10.2.0.0/16", "--egress-resolver", "192.0.2.1", "--egress-resolver", "192.0.2.2", "--egress-roots", "/srv/roots.pem",
		"--secret-kms", "/usr/bin/kms --key a", "--log-level", "debug", "--log-format", "json", "--drain-within", "5m", "--url", "https://cloche.example:443",
	},
	"open": {"--listen", "0.0.0.0:80", "--insecure", "--run-dir", "/run/other/cloche"},
}

// TestUnitIsValid asks systemd itself.
func TestUnitIsValid(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("SKIPPED: no systemd-analyze here, so systemd's own check of the unit did not run (scripts/deps.sh installs it)")
	}
	for name, flags := range units {
		code, text, errOut := program(t, append([]string{"service", "install", "--dry-run"}, flags...)...)
		if code != 0 {
			t.Fatalf("%s: exit code %d: %s", name, code, errOut)
		}
		verify := func(text string) (string, error) {
			path := filepath.Join(t.TempDir(), "cloche.service")
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			out, err := exec.CommandContext(t.Context(), "systemd-analyze", "verify", "--man=no", path).CombinedOutput()
			return string(out), err
		}
		if out, err := verify(text); err != nil || out != "" {
			t.Errorf("%s: %v: %s\n%s", name, err, out, text)
		}
		if out, err := verify(strings.Replace(text, "KillMode=process", "KillMode=nothing", 1)); err == nil && out == "" {
			t.Error("the check finds nothing")
		}
	}
}

// TestUnitKeepsMachines: what the unit must say, and that it says nothing that
// is not known to leave the mounts alone.
func TestUnitKeepsMachines(t *testing.T) {
	known := strings.Fields(`Description Wants After RequiresMountsFor StartLimitIntervalSec StartLimitBurst Type ExecStart ExecStop KillMode Delegate
		OOMPolicy TasksMax LimitNOFILE RuntimeDirectory RuntimeDirectoryMode RuntimeDirectoryPreserve UMask Restart RestartSec RestartPreventExitStatus
		TimeoutStartSec TimeoutStopSec WantedBy`)
	for name, flags := range units {
		_, text, _ := program(t, append([]string{"service", "install", "--dry-run"}, flags...)...)
		for _, m := range regexp.MustCompile(`(?m)^(\w+)=`).FindAllStringSubmatch(text, -1) {
			if !slices.Contains(known, m[1]) {
				t.Errorf("%s: %s= is not known to make no mount namespace", name, m[1])
			}
		}
		for _, want := range []string{"Type=notify", "KillMode=process", "Delegate=yes", "Restart=always", "OOMPolicy=continue"} {
			if !strings.Contains(text, "\n"+want+"\n") {
				t.Errorf("%s: there is no %s", name, want)
			}
		}
	}
}

func TestUnitText(t *testing.T) {
	t.Setenv("CLOCHE_STATE_DIR", "")
	t.Setenv("CLOCHE_LISTEN", "")
	for name, want := range map[string][]string{
		"plain": {
			" serve --state-dir=/var/lib/cloche --listen=127.0.0.1:7070 --run-dir=/run/cloche\n",
			" drain --state-dir=/var/lib/cloche --url=http://127.0.0.1:7070 --within=1m30s --if-host-stops\n",
			"\nRuntimeDirectory=cloche\n", "\nRuntimeDirectoryPreserve=yes\n", "\nRequiresMountsFor=/var/lib/cloche\n", "\nTimeoutStopSec=130\n",
		},
		"all": {
			`"--state-dir=/srv/50%% of \"it\"" --listen=[::]:443 "--run-dir=/srv/run of cloche" --tls-cert=/srv/$$c.pem --tls-key=/srv/k.pem`,
			"--metrics=127.0.0.1:7071 --memory-overcommit=1.5 --cpu-overcommit=2 --disk-floor=64 --driver=firecracker --allow-vulnerable=1.12.1",
			" --egress-open=10.1.0.0/16 --egress-open=10.2.0.0/16 --egress-resolver=192.0.2.1 --egress-resolver=192.0.2.2 --egress-roots=/srv/roots.pem",
			` "--secret-kms=/usr/bin/kms --key a" --log-level=debug --log-format=json` + "\n", "--url=https://cloche.example:443 --within=5m0s", "\nTimeoutStopSec=340\n",
		},
		"open": {"--listen=0.0.0.0:80 --run-dir=/run/other/cloche --insecure=true\n", "--url=http://127.0.0.1:80", "\nRuntimeDirectory=other/cloche\n"},
	} {
		_, text, _ := program(t, append([]string{"service", "install", "--dry-run"}, units[name]...)...)
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("%s: there is no %q in\n%s", name, w, text)
			}
		}
		if name == "all" && strings.Contains(text, "RuntimeDirectory") {
			t.Error("a directory that is not below /run")
		}
	}
}

// TestUnitHasEveryFlag: what is given to `service install` is not lost, whatever
// serve takes some day.
func TestUnitHasEveryFlag(t *testing.T) {
	given := slices.Concat(units["all"], units["open"])
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	new(serveFlags).register(flags)
	flags.VisitAll(func(f *pflag.Flag) {
		if !slices.Contains(given, "--"+f.Name) {
			t.Errorf("the units of these tests have no --%s", f.Name)
		}
	})
}

func TestServiceFlagsAreChecked(t *testing.T) {
	for _, flags := range [][]string{
		{"--listen", "x"},
		{"--listen", "127.0.0.1:0"},
		{"--log-level", "loud"},
		{"--driver", "qemu"},
		{"--log-format", "xml"},
		{"--drain-within", "0s"},
		{"--name", "../x"},
		{"--name", ""},
		{"--state-dir", "/a\nExecStart=/bin/false"},
	} {
		if code, out, _ := program(t, append([]string{"service", "install", "--dry-run"}, flags...)...); code != 1 || out != "" {
			t.Errorf("%v: exit code %d, %q", flags, code, out)
		}
	}
}

// TestInstall writes a unit where systemd does not look.
func TestInstall(t *testing.T) {
	if os.Geteuid() != 0 {
		code, _, errOut := program(t, "service", "install", "--unit-dir", t.TempDir())
		if code != exitDenied || !strings.Contains(errOut, "only root") {
			t.Errorf("exit code %d: %s", code, errOut)
		}
		t.Skip("SKIPPED: installing needs root")
	}
	dir := t.TempDir()
	install := func(flags ...string) string {
		code, _, errOut := program(t, append([]string{"service", "install", "--unit-dir", dir}, flags...)...)
		if code != 0 {
			t.Fatalf("exit code %d: %s", code, errOut)
		}
		return errOut
	}
	path := filepath.Join(dir, "cloche.service")
	if said := install(); !strings.Contains(said, "wrote "+path) {
		t.Error(said)
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o644 {
		t.Fatal(st, err)
	}
	if said := install(); !strings.Contains(said, "as it should be") {
		t.Error(said)
	}
	if again, err := os.Stat(path); err != nil || !os.SameFile(st, again) {
		t.Error("a unit that had not changed was written")
	}
	said := install("--log-level", "debug")
	if !strings.Contains(said, "changed") || strings.Count(said, "\n  + ExecStart=") != 1 || strings.Count(said, "\n  - ExecStart=") != 1 || strings.Contains(said, "Delegate") {
		t.Error(said)
	}
	if list, err := os.ReadDir(dir); err != nil || len(list) != 1 {
		t.Errorf("left behind: %v, %v", list, err)
	}
	for range 2 {
		if code, _, errOut := program(t, "service", "uninstall", "--unit-dir", dir); code != 0 {
			t.Errorf("uninstall: %d, %s", code, errOut)
		}
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

func TestServiceStatus(t *testing.T) {
	fakeSystemctl(t, `echo UnitFileState=enabled; echo ActiveState=active; echo SubState=running; echo MainPID=7; echo NRestarts=1`)
	code, out, errOut := program(t, "service", "status", "--json", "--url", "http://127.0.0.1:1", "--unit-dir", t.TempDir())
	var st serviceStatus
	if err := json.Unmarshal([]byte(out), &st); err != nil || code != 0 {
		t.Fatal(code, err, errOut)
	}
	if st.Installed || st.Active != "active" || st.State != "running" || st.PID != "7" || st.Restarts != "1" || st.Enabled != "enabled" {
		t.Errorf("%+v", st)
	}
	fakeSystemctl(t, `echo ActiveState=failed`)
	if code, _, _ := program(t, "service", "status", "--url", "http://127.0.0.1:1"); code != 3 {
		t.Errorf("exit code %d", code)
	}
}

func TestNotify(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	tell := serviceManager()
	if os.Getenv("NOTIFY_SOCKET") != "" {
		t.Error("children could speak for the daemon")
	}
	tell("READY=1")
	if err := l.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	n, err := l.Read(b)
	if err != nil || string(b[:n]) != "READY=1" {
		t.Errorf("%q, %v", b[:n], err)
	}
	serviceManager()("READY=1") // nobody asked
}

// drained is a daemon that was asked to drain.
func drained(t *testing.T, r api.DrainReport) (url string, asked *[]string) {
	t.Helper()
	asked = &[]string{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		b, _ := io.ReadAll(req.Body)
		*asked = append(*asked, req.Method+" "+req.URL.Path+" "+string(b))
		reply(w, 200, r)
	}))
	t.Cleanup(srv.Close)
	return srv.URL, asked
}

func TestDrain(t *testing.T) {
	box := "sbx_" + idTail
	url, asked := drained(t, api.DrainReport{Done: []string{box + "b", box + "a"}, Left: map[string]string{}})
	code, out, errOut := program(t, "drain", "--url", url, "--key", "k", "--within", "7s")
	if code != 0 || out != "saved  "+box+"a\nsaved  "+box+"b\n2 saved, 0 left\n" {
		t.Errorf("exit code %d: %q %s", code, out, errOut)
	}
	if len(*asked) != 1 || !strings.HasPrefix((*asked)[0], "POST /v1/host/drain ") || !strings.Contains((*asked)[0], `"within_seconds":7`) {
		t.Errorf("asked %q", *asked)
	}
	url, _ = drained(t, api.DrainReport{Done: []string{}, Left: map[string]string{box + "c": "no\ntime"}})
	code, out, _ = program(t, "drain", "--url", url, "--key", "k")
	if code != 5 || out != "LEFT   "+box+"c  no time\n0 saved, 1 left\n" {
		t.Errorf("exit code %d: %q", code, out)
	}
}

// TestDrainIfHostStops: an ordinary restart of the service drains nothing.
func TestDrainIfHostStops(t *testing.T) {
	for script, want := range map[string]struct{ code, asked int }{
		`[ $1 = is-system-running ] && echo running`: {0, 0},
		`echo degraded; exit 1`:                      {0, 0},
		`echo stopping; exit 1`:                      {0, 1},
		`[ $1 = is-system-running ] && { echo unknown; exit 1; }; echo "9 shutdown.target start waiting"`:        {0, 1},
		`[ $1 = is-system-running ] && { echo offline; exit 1; }; echo "9 cloche.service restart running"`:       {0, 0},
		`[ $1 = is-system-running ] && { echo offline; exit 1; }; echo "System has not been booted" >&2; exit 1`: {5, 0},
		`echo "Failed to connect" >&2; exit 1`: {5, 0},
		`[ $1 = is-system-running ] && { echo unknown; exit 1; }; echo "9 shutdown.target stop waiting"`:             {0, 0},
		`[ $1 = is-system-running ] && { echo unknown; exit 1; }; echo "9 my-shutdown.target.service start waiting"`: {0, 0},
	} {
		fakeSystemctl(t, script)
		url, asked := drained(t, api.DrainReport{})
		code, _, errOut := program(t, "drain", "--if-host-stops", "--url", url, "--key", "k")
		if code != want.code || len(*asked) != want.asked {
			t.Errorf("%s: exit code %d, %d calls (%s)", script, code, len(*asked), errOut)
		}
	}
}

// TestBackupCommand: what it can say without a store.
func TestBackupCommand(t *testing.T) {
	dir := t.TempDir()
	for want, args := range map[int][]string{
		1: {"backup"},
		2: {"backup", filepath.Join(dir, "new"), "--state-dir", t.TempDir()},
		3: {"backup", dir, "--state-dir", "/nowhere"},
	} {
		if code, _, errOut := program(t, args...); code != want {
			t.Errorf("%v: exit code %d, want %d: %s", args, code, want, errOut)
		}
	}
	if code, _, _ := program(t, "backup", "verify", dir); code != 2 {
		t.Errorf("verify of nothing: exit code %d", code)
	}
	if list, err := os.ReadDir(dir); err != nil || len(list) != 0 {
		t.Errorf("left behind: %v, %v", list, err)
	}
}
