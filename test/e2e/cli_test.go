package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/test/harness"
)

// TestCLI goes through a sandbox's whole life by command line.
func TestCLI(t *testing.T) {
	d := harness.Start(t)
	warm := create(t, d)
	d.Must("rm", warm)
	fds, control := d.Usage().FDs, d.ControlFDs()
	box := create(t, d, "--name", "dev", "-l", "team=blue", "--memory", "512MiB")
	for _, c := range []struct {
		name string
		run  func(*testing.T, *harness.Daemon, string)
	}{
		{"run", cliRun},
		{"live output", cliLive},
		{"Ctrl-C", cliInterrupt},
		{"terminal", cliTerminal},
		{"sessions", cliSessions},
		{"copy", cliCopy},
		{"forward", cliForward},
		{"rows", cliRows},
		{"templates", cliTemplates},
		{"keys", cliKeys},
		{"codes of errors", cliErrors},
		{"host", cliHost},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, d.For(t), box) })
	}
	d.Must("rm", "dev")
	if r := d.CLI("inspect", box); r.Code != 0 && r.Code != 2 {
		t.Errorf("inspect of a deleted sandbox: %+v", r)
	}
	if left := d.WaitCensus(10 * time.Second); len(left) > 0 {
		t.Errorf("left: %s", strings.Join(left, "\n"))
	}
	d.DemandLevel(fds, control)
}

func cliRun(t *testing.T, d *harness.Daemon, _ string) {
	r := d.CLI("run", "--rm", "base", "--", "python3", "-c", "import sys; print(6*7); print('err', file=sys.stderr); sys.exit(3)")
	if r.Code != 3 || r.Stdout != "42\n" || !strings.Contains(r.Stderr, "err\n") {
		t.Errorf("run: %+v", r)
	}
	t.Logf("run --rm took %v (load %s)", r.Took, load())
	if r := d.CLI("run", "--rm", "base", "--", "bash", "-c", "kill -TERM $$"); r.Code != 128+15 {
		t.Errorf("a signal's exit code: %+v", r)
	}
	cmd := d.Command(t.Context(), "run", "--rm", "-i", "base", "--", "sha256sum")
	data := bytes.Repeat([]byte("0123456789\xff\x00\n"), 300_000)
	cmd.Stdin = bytes.NewReader(data)
	out, err := cmd.Output()
	want, _ := digest(bytes.NewReader(data))
	if err != nil || !strings.Contains(want, strings.Fields(string(out) + " ?")[0]) {
		t.Errorf("stdin of %d bytes: %q instead of %s: %v", len(data), out, want, err)
	}
	if r := d.CLI("run", "--rm", "base", "--", "/no/such/program"); r.Code != 125 && r.Code != 127 || r.Stderr == "" {
		t.Errorf("a program that is not there: %+v", r)
	}
	if r := d.CLI("run", "--rm", "-e", "A=b c", "-w", "/usr", "-u", "root", "base", "--", "bash", "-c", "echo $A $PWD $(id -un)"); r.Stdout != "b c /usr root\n" {
		t.Errorf("env, cwd and user: %+v", r)
	}
	if ids := d.Must("ls", "--ids"); strings.Contains(ids, "\n") {
		t.Errorf("run --rm left sandboxes:\n%s", ids)
	}
}

func cliLive(t *testing.T, d *harness.Daemon, box string) {
	cmd := d.Command(t.Context(), "exec", "-i", box, "--", "bash", "-c", "echo one; read x; echo got $x")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	if l, err := lines.ReadString('\n'); l != "one\n" {
		t.Errorf("the first line did not come while the command ran: %q, %v", l, err)
	}
	_, _ = io.WriteString(in, "two\n")
	if l, err := lines.ReadString('\n'); l != "got two\n" {
		t.Errorf("the answer to input: %q, %v", l, err)
	}
	_ = in.Close()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

func cliInterrupt(t *testing.T, d *harness.Daemon, box string) {
	cmd := d.Command(t.Context(), "exec", box, "--", "bash", "-c", "trap 'echo trapped; exit 7' INT; echo ready; while :; do sleep 0.1; done")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	_, _ = lines.ReadString('\n')
	_ = cmd.Process.Signal(os.Interrupt)
	if l, _ := lines.ReadString('\n'); l != "trapped\n" {
		t.Errorf("Ctrl-C did not reach the command: %q", l)
	}
	_ = cmd.Wait()
	if c := cmd.ProcessState.ExitCode(); c != 7 {
		t.Errorf("exit code %d instead of the command's 7", c)
	}
}

func cliTerminal(t *testing.T, d *harness.Daemon, box string) {
	cmd := d.Command(t.Context(), "exec", "-it", box, "--", "bash", "--norc")
	f, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 33, Cols: 101})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	seen := &screen{}
	go func() { _, _ = io.Copy(seen, f) }()
	say := func(s string) { _, _ = io.WriteString(f, s) }
	say("tty; stty size; echo m''ark\n")
	eventually(t, "a terminal of 33 by 101: "+seen.String(), 20*time.Second, func() bool {
		return strings.Contains(seen.String(), "/dev/pts/") && strings.Contains(seen.String(), "33 101") && strings.Contains(seen.String(), "mark")
	})
	say("bash -c 'echo be''gin; exec sleep 100'\n")
	eventually(t, "the command runs", 20*time.Second, func() bool { return strings.Contains(seen.String(), "begin\r\n") })
	for begin := time.Now(); !strings.Contains(seen.String(), "code-130"); {
		if time.Since(begin) > 20*time.Second {
			t.Fatalf("Ctrl-C does not end sleep; the terminal shows:\n%q", seen.String())
		}
		say("\x03")
		time.Sleep(500 * time.Millisecond) // what is typed before the signal is thrown away with it
		say("echo code-$?\n")
		time.Sleep(500 * time.Millisecond)
	}
	_ = pty.Setsize(f, &pty.Winsize{Rows: 44, Cols: 90})
	eventually(t, "the new size arrives", 10*time.Second, func() bool {
		say("stty size\n")
		time.Sleep(200 * time.Millisecond)
		return strings.Contains(seen.String(), "44 90")
	})
	say("exit 9\n")
	_ = cmd.Wait()
	if c := cmd.ProcessState.ExitCode(); c != 9 {
		t.Errorf("exit code %d instead of 9\n%s", c, seen.String())
	}
}

func cliSessions(t *testing.T, d *harness.Daemon, box string) {
	ses := d.Must("exec", "-d", box, "--", "bash", "-c", "echo begin; sleep 1; echo end >&2; exit 4")
	if !strings.HasPrefix(ses, "ses_") {
		t.Fatalf("exec -d printed %q", ses)
	}
	if r := d.CLI("attach", box, ses); r.Code != 4 || r.Stdout != "begin\n" || !strings.Contains(r.Stderr, "end\n") {
		t.Errorf("attach: %+v", r)
	}
	if r := d.CLI("logs", box, ses); r.Code != 0 || r.Stdout != "begin\n" || !strings.Contains(r.Stderr, "end\n") {
		t.Errorf("logs: %+v", r)
	}
	if r := d.CLI("logs", "--since-offset", "2", "dev", ses[:12]); r.Stdout != "gin\n" {
		t.Errorf("logs by the beginnings of names, from an offset: %+v", r)
	}
	for l := range strings.Lines(d.Must("--json", "logs", box, ses)) {
		var e api.StreamEvent
		if err := json.Unmarshal([]byte(l), &e); err != nil || e.Type == "" {
			t.Errorf("logs --json prints %q: %v", l, err)
		}
	}
	var in struct {
		api.Sandbox
		Sessions []api.Session `json:"sessions"`
	}
	if err := json.Unmarshal([]byte(d.Must("--json", "inspect", "dev")), &in); err != nil || in.Id != box || len(in.Sessions) == 0 || in.Labels["team"] != "blue" {
		t.Errorf("inspect --json: %v, %+v", err, in)
	}
	if r := d.CLI("exec", "--timeout", "1s", box, "--", "sleep", "60"); r.Code != 128+15 || r.Took > 20*time.Second {
		t.Errorf("a timeout: %+v", r)
	}
}

func cliCopy(t *testing.T, d *harness.Daemon, box string) {
	dir := t.TempDir()
	src := filepath.Join(dir, "tree")
	blob := bytes.Repeat([]byte{0, 1, 2, 0xfe, 0xff}, 1<<20)
	for name, content := range map[string][]byte{"a.txt": []byte("a\n"), "sub/deep/blob": blob, "sub/empty": nil, "run.sh": []byte("#!/bin/sh\necho ran\n")} {
		p := filepath.Join(src, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	_ = os.Chmod(filepath.Join(src, "run.sh"), 0o755)
	_ = os.Symlink("a.txt", filepath.Join(src, "link"))
	d.Must("cp", src, box+":/home/user")
	if out := mustScript(t, d, box, "user", "cd ~/tree && ./run.sh && cat link && stat -c %U sub/deep/blob && echo x >> a.txt && stat -c %s sub/deep/blob"); out != "ran\na\nuser\n5242880" {
		t.Errorf("the tree inside: %q", out)
	}
	back := filepath.Join(dir, "back")
	d.Must("cp", "dev:/home/user/tree", back)
	if out, err := exec.Command("diff", "-r", "--no-dereference", filepath.Join(src, "sub"), filepath.Join(back, "sub")).CombinedOutput(); err != nil {
		t.Errorf("the tree came back otherwise: %s", out)
	}
	if b, _ := os.ReadFile(filepath.Join(back, "link")); string(b) != "a\nx\n" {
		t.Errorf("through the link: %q", b)
	}
	if i, err := os.Stat(filepath.Join(back, "run.sh")); err != nil || i.Mode().Perm() != 0o755 {
		t.Errorf("mode: %v, %v", i, err)
	}
	mustScript(t, d, box, "user", "mkdir ~/evil && ln -s /etc/shadow ~/evil/abs && ln -s ../../../../etc ~/evil/up && mkfifo ~/evil/pipe && echo ok > ~/evil/ok")
	if r := d.CLI("cp", box+":/home/user/evil", dir); r.Code != 0 {
		t.Errorf("a tree with links that lead out: %+v", r)
	}
	for _, name := range []string{"abs", "up", "pipe"} {
		if _, err := os.Lstat(filepath.Join(dir, "evil", name)); err == nil {
			t.Errorf("%s came out of the sandbox", name)
		}
	}
	if out := d.Must("cp", box+":/home/user/evil/ok", "-"); out != "ok" {
		t.Errorf("cp to -: %q", out)
	}
	if r := d.CLI("cp", box+":/no/such", dir); r.Code != 2 {
		t.Errorf("a file that is not there: %+v", r)
	}
}

func cliForward(t *testing.T, d *harness.Daemon, box string) {
	d.Must("exec", "-d", box, "--", "python3", "-m", "http.server", "-d", "/etc", "--bind", "127.0.0.1", "8000")
	mustScript(t, d, box, "user", "for i in $(seq 100); do curl -sf 127.0.0.1:8000/hostname -o /dev/null && exit 0; sleep .1; done; exit 1")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := d.Command(ctx, "--json", "forward", box, "0:8000")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var told struct {
		Local string `json:"local"`
	}
	if err := json.NewDecoder(out).Decode(&told); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		resp, err := http.Get("http://" + told.Local + "/passwd")
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if !bytes.Contains(b, []byte("/home/user")) {
			t.Fatalf("through the forward: %q", b)
		}
	}
	_ = cmd.Process.Signal(syscall.SIGINT)
	_ = cmd.Wait()
	if c := cmd.ProcessState.ExitCode(); c != 0 {
		t.Errorf("forward after Ctrl-C: exit code %d", c)
	}
	if _, err := net.Dial("tcp", told.Local); err == nil {
		t.Error("the forward's port is still open")
	}
}

func cliRows(t *testing.T, d *harness.Daemon, box string) {
	if ids := d.Must("ls", "--ids", "-l", "team=blue"); ids != box {
		t.Errorf("ls by label: %q", ids)
	}
	if ids := d.Must("ls", "--ids", "-l", "team=red"); ids != "" {
		t.Errorf("ls by another label: %q", ids)
	}
	d.Must("update", "-l", "team=green", box)
	var l api.SandboxList
	if err := json.Unmarshal([]byte(d.Must("--json", "ls", "-s", "running")), &l); err != nil || len(l.Items) != 1 || l.Items[0].Labels["team"] != "green" || l.Items[0].Labels["name"] != "dev" {
		t.Errorf("ls --json: %v, %+v", err, l)
	}
	if !strings.Contains(d.Must("ls"), "dev") {
		t.Error("the table does not name it")
	}
	var ops api.OperationList
	if err := json.Unmarshal([]byte(d.Must("--json", "op", "ls", "--sandbox", box)), &ops); err != nil || len(ops.Items) != 1 || ops.Items[0].Verb != "create" || ops.Items[0].State != "succeeded" {
		t.Fatalf("op ls: %v, %+v", err, ops)
	}
	for _, verb := range []string{"get", "wait"} {
		if out := d.Must("--json", "op", verb, ops.Items[0].Id); !json.Valid([]byte(out)) {
			t.Errorf("op %s: %q", verb, out)
		}
	}
}

func cliTemplates(t *testing.T, d *harness.Daemon, box string) {
	var list api.TemplateList
	if err := json.Unmarshal([]byte(d.Must("--json", "template", "ls")), &list); err != nil || len(list.Items) != 1 {
		t.Fatalf("template ls: %v, %+v", err, list)
	}
	d.Must("template", "tag", "base", "base:stable")
	if out := d.Must("template", "inspect", "base:stable"); !strings.Contains(out, list.Items[0].Digest) {
		t.Errorf("a release names another template: %s", out)
	}
	if r := d.CLI("template", "rm", list.Items[0].Digest); r.Code != 3 || !strings.Contains(r.Stderr, "hint:") {
		t.Errorf("a template in use was deleted, or no hint given: %+v", r)
	}
	d.Must("template", "rm", "--untag", "base:stable")
	if r := d.CLI("create", "base:stable"); r.Code != 2 {
		t.Errorf("create from a release that is gone: %+v", r)
	}
	file := filepath.Join(t.TempDir(), "root.tar")
	if err := os.WriteFile(file, smallRoot(t), 0o600); err != nil {
		t.Fatal(err)
	}
	d.Must("template", "build", "--tar", file, "small:1")
	d.Must("template", "rm", "small:1")
	_ = box
}

func cliKeys(t *testing.T, d *harness.Daemon, box string) {
	secret := d.Must("key", "create", "--role", "read", "reader")
	if r := d.CLI("--key", secret, "ls"); r.Code != 0 {
		t.Errorf("a read key can't list: %+v", r)
	}
	if r := d.CLI("--key", secret, "exec", box, "--", "true"); r.Code != 125 {
		t.Errorf("a read key may exec: %+v", r)
	}
	if r := d.CLI("--key", secret, "rm", box); r.Code != 4 {
		t.Errorf("a read key may delete: %+v", r)
	}
	var keys api.KeyList
	if err := json.Unmarshal([]byte(d.Must("--json", "key", "ls")), &keys); err != nil || len(keys.Items) != 2 {
		t.Fatalf("key ls: %v, %+v", err, keys)
	}
	for _, k := range keys.Items {
		if k.Name == "reader" {
			d.Must("key", "revoke", k.Id)
		}
	}
	if r := d.CLI("--key", secret, "ls"); r.Code != 4 {
		t.Errorf("a revoked key: %+v", r)
	}
}

func cliErrors(t *testing.T, d *harness.Daemon, box string) {
	for _, c := range []struct {
		code int
		args []string
	}{
		{1, []string{"ls", "--no-such-flag"}},
		{1, []string{"nonsense"}},
		{1, []string{"create"}},
		{2, []string{"inspect", "sbx_aaaaaaaaaaaaaaaaaaaa"}},
		{2, []string{"rm", "nobody"}},
		{0, []string{"rm", "--force", "nobody"}},
		{2, []string{"create", "no-such-template"}},
		{4, []string{"--key", "cloche_wrong", "ls"}},
		{5, []string{"--url", "http://127.0.0.1:1", "ls"}},
		{125, []string{"exec", "nobody", "--", "true"}},
		{125, []string{"run", "no-such-template", "--", "true"}},
	} {
		r := d.CLI(c.args...)
		if r.Code != c.code || c.code != 0 && !strings.HasPrefix(r.Stderr, "cloche: ") {
			t.Errorf("cloche %s: code %d instead of %d, %q", strings.Join(c.args, " "), r.Code, c.code, r.Stderr)
		}
		if c.code > 0 && !strings.Contains(r.Stderr, "hint:") {
			t.Errorf("cloche %s does not say the next step: %q", strings.Join(c.args, " "), r.Stderr)
		}
	}
	_ = box
}

func cliHost(t *testing.T, d *harness.Daemon, _ string) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if out := d.Must("completion", shell); len(out) < 500 {
			t.Errorf("completion %s: %q", shell, out)
		}
	}
	if out := d.Must("__complete", "templ"); !strings.Contains(out, "template") {
		t.Errorf("completion: %q", out)
	}
	r := d.CLI("--json", "doctor")
	if !json.Valid([]byte(r.Stdout)) {
		t.Errorf("doctor --json: %+v", r)
	}
	if r := d.CLI("doctor"); !strings.Contains(strings.ToLower(r.Stdout), "cgroup") || !strings.Contains(strings.ToLower(r.Stdout), "kvm") {
		t.Errorf("doctor: %+v", r)
	}
	var v struct{ Client, Daemon, Driver string }
	if err := json.Unmarshal([]byte(d.Must("--json", "version")), &v); err != nil || v.Driver != "gvisor" || v.Daemon == "" {
		t.Errorf("version: %v, %+v", err, v)
	}
}
