package backup

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/node/artifact"
	"cloche.dev/cloche/internal/node/driver/firecracker/installed"
	"cloche.dev/cloche/internal/node/session"
	seslog "cloche.dev/cloche/internal/node/session/log"
	"cloche.dev/cloche/internal/node/snapshot"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/store/sqlite"
	"cloche.dev/cloche/internal/template"
)

// state is a state directory in use: its store stays open for the whole test.
type state struct {
	*testing.T
	dir                 string
	store               *sqlite.Store
	project, digest     string
	box                 sandbox.Sandbox
	disk, memory, ghost string // snapshots; the last one's files are gone
	session             string
	engine              string // an artifact that the memory snapshot needs
	pair                installed.PairRecord
}

type noGuests struct{}

func (noGuests) Client(context.Context, string) (guestv1connect.GuestClient, error) {
	return nil, errors.New("no guest")
}

func (s *state) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func newState(t *testing.T) *state {
	s := &state{T: t, dir: filepath.Join(t.TempDir(), "state")}
	s.must(os.Mkdir(s.dir, 0o700))
	var err error
	s.store, err = sqlite.Open(t.Context(), filepath.Join(s.dir, storeName), nil)
	s.must(err)
	t.Cleanup(func() { _ = s.store.Close() })
	p := sandbox.Project{ID: sandbox.NewID(sandbox.KindProject), Name: "default", CreatedAt: time.Now()}
	s.project = p.ID
	s.must(s.store.CreateProject(t.Context(), p))
	s.template()
	s.sandbox()
	s.engine = s.artifact("engine")
	s.disk = s.snapshot(sandbox.SnapshotDisk, sandbox.Needs{})
	s.memory = s.snapshot(sandbox.SnapshotMemory, sandbox.Needs{EngineHash: s.engine, Guest: s.artifact("guest")})
	s.artifact("of nothing")
	s.install()
	s.ghost = s.snapshot(sandbox.SnapshotDisk, sandbox.Needs{})
	s.must(os.RemoveAll(filepath.Join(s.dir, snapshotsDir, s.ghost)))
	s.log("first\n")
	for _, name := range keyFiles {
		s.must(os.WriteFile(filepath.Join(s.dir, name), []byte("secret"), 0o600))
	}
	s.must(os.MkdirAll(filepath.Join(s.dir, "machines", s.box.ID), 0o700))
	s.must(os.WriteFile(filepath.Join(s.dir, "machines", s.box.ID, "machine.json"), []byte("key"), 0o600))
	return s
}

func (s *state) template() {
	store, err := template.Open(s.dir, template.Limits{})
	s.must(err)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	s.must(w.WriteHeader(&tar.Header{Name: "etc/hello", Mode: 0o644, Size: 5, Typeflag: tar.TypeReg}))
	_, err = io.WriteString(w, "hello")
	s.must(errors.Join(err, w.Close()))
	built, err := store.ImportTar(s.Context(), &b, sandbox.RuntimeConfig{})
	s.must(err)
	s.digest = built.Digest
	_, err = s.store.PutTemplate(s.Context(), sandbox.Template{Digest: s.digest, Project: s.project, Source: "tar", CreatedAt: time.Now()}, "base:latest")
	s.must(err)
}

func (s *state) sandbox() {
	sb := sandbox.Sandbox{
		ID: sandbox.NewID(sandbox.KindSandbox), Project: s.project, Template: "base:latest", Resources: sandbox.DefaultResources,
		Policy: sandbox.DefaultPolicy, CreatedAt: time.Now(),
	}
	op := sandbox.Operation{ID: sandbox.NewID(sandbox.KindOperation), Project: s.project, Verb: sandbox.VerbCreate, Key: "k", CreatedAt: time.Now()}
	sb, op, _, err := s.store.CreateSandbox(s.Context(), sb, op, sandbox.Capacity{}, sandbox.Idempotency{})
	s.must(err)
	s.must(s.store.FinishOperation(s.Context(), op.ID, sandbox.Outcome{To: sandbox.StateRunning, Epoch: sb.Generation}))
	s.box = sb
}

func (s *state) snapshot(kind sandbox.SnapshotKind, needs sandbox.Needs) string {
	id := sandbox.NewID(sandbox.KindSnapshot)
	_, op, _, err := s.store.BeginVerb(s.Context(), s.project, s.box.ID, sandbox.VerbSnapshot, sandbox.Begin{
		Op:       sandbox.Operation{ID: sandbox.NewID(sandbox.KindOperation), Key: "k", CreatedAt: time.Now()},
		Snapshot: &sandbox.Snapshot{ID: id, Name: id, Kind: kind, Purpose: sandbox.PurposeNamed, CreatedAt: time.Now()},
	}, sandbox.Idempotency{})
	s.must(err)
	files, err := snapshot.Open(filepath.Join(s.dir, snapshotsDir))
	s.must(err)
	d, err := files.Begin(id)
	s.must(err)
	s.must(os.WriteFile(filepath.Join(d.Dir(), "disk.img"), []byte("disk of "+id), 0o600))
	m := snapshot.Manifest{
		Project: s.project, Sandbox: s.box.ID, Kind: kind, TakenAt: time.Now(), Needs: needs, Resources: sandbox.DefaultResources, MaxProcs: 9,
	}
	if kind == sandbox.SnapshotMemory {
		m.Key = []byte("guest's key")
	}
	made, err := d.Commit(s.Context(), m)
	s.must(err)
	status := made.Status()
	s.must(s.store.FinishOperation(s.Context(), op.ID, sandbox.Outcome{To: sandbox.StateRunning, Snapshot: &status}))
	return id
}

func (s *state) artifact(content string) string {
	store, err := artifact.Open(filepath.Join(s.dir, artifactsDir))
	s.must(err)
	a, err := store.Put("tool", strings.NewReader(content))
	s.must(err)
	return a.Hash
}

// install makes what `cloche firecracker install` and `cloche kernel install` do.
func (s *state) install() {
	dir := filepath.Join(s.dir, "firecracker", "versions")
	s.must(os.MkdirAll(dir, 0o700))
	s.pair = installed.PairRecord{Version: "1.15.1", Firecracker: s.artifact("firecracker"), Jailer: s.artifact("jailer"), InstalledAt: time.Now()}
	data, err := json.Marshal(s.pair)
	s.must(err)
	s.must(os.WriteFile(filepath.Join(dir, "1.15.1.json"), data, 0o600))
	store, err := artifact.Open(filepath.Join(s.dir, artifactsDir))
	s.must(err)
	_, err = installed.Open(s.dir, store).PutKernel(s.Context(), "linux-6.1", strings.NewReader("vmlinux"), strings.NewReader("modules"))
	s.must(err)
}

// log makes a session whose command ran and is still running.
func (s *state) log(output string) {
	m, err := session.New(session.Options{Dir: filepath.Join(s.dir, sessionsDir), Guests: noGuests{}})
	s.must(err)
	defer func() { s.must(m.Close()) }()
	s.session = sandbox.NewID(sandbox.KindSession)
	s.must(m.Register(s.Context(), sandbox.Session{ID: s.session, Project: s.project, Sandbox: s.box.ID, CreatedAt: time.Now()}))
	s.append(output)
}

func (s *state) append(output string) {
	l, err := seslog.Open(filepath.Join(s.dir, sessionsDir, s.box.ID, s.session), seslog.Options{})
	s.must(err)
	s.must(l.Append(seslog.Stdout, []byte(output)))
	s.must(errors.Join(l.Sync(), l.Close()))
}

func (s *state) backup(keys bool) (string, Report) {
	s.Helper()
	to := filepath.Join(filepath.Dir(s.dir), sandbox.NewID("backup-"))
	r, err := Write(s.Context(), Options{StateDir: s.dir, To: to, WithKeys: keys, Version: "v1"})
	s.must(err)
	return to, r
}

func has(dir string, names ...string) bool {
	_, err := os.Lstat(filepath.Join(append([]string{dir}, names...)...))
	return err == nil
}

// TestRestore puts a backup in the place of the state directory and opens all
// of it again.
func TestRestore(t *testing.T) {
	s := newState(t)
	dir, r := s.backup(false)
	s.append("later\n") // is not in it
	if r.Sandboxes != 1 || r.Templates != 1 || r.Snapshots != 1 || r.Sessions != 1 || r.Keys || r.Bytes < r.Linked || r.Linked == 0 {
		t.Errorf("%+v", r)
	}
	if !slices.Equal(r.LeftOut, []string{s.memory}) || len(r.Missing) != 1 || r.Missing[s.ghost] == "" {
		t.Errorf("left out %v, missing %v", r.LeftOut, r.Missing)
	}
	checked, err := Verify(t.Context(), dir)
	if err != nil || checked.Files != r.Files || !checked.At.Equal(r.At) {
		t.Errorf("Verify: %+v, %v", checked, err)
	}

	s.must(s.store.Close())
	s.must(os.Rename(s.dir, s.dir+".old"))
	s.must(os.Rename(dir, s.dir))
	store, err := sqlite.Open(t.Context(), filepath.Join(s.dir, storeName), nil)
	s.must(err)
	defer store.Close()
	if sb, err := store.Sandbox(t.Context(), "", s.box.ID); err != nil || sb.State != sandbox.StateRunning {
		t.Errorf("%+v, %v", sb, err)
	}
	templates, err := template.Open(s.dir, template.Limits{})
	s.must(err)
	if _, err := templates.Image(t.Context(), s.digest); err != nil {
		t.Error(err)
	}
	snapshots, err := snapshot.Open(filepath.Join(s.dir, snapshotsDir))
	s.must(err)
	if _, err := snapshots.Verify(t.Context(), s.disk); err != nil {
		t.Error(err)
	}
	if e := (*sandbox.Error)(nil); !errors.As(func() error { _, err := snapshots.Verify(t.Context(), s.memory); return err }(), &e) || e.Code != "snapshot_missing" {
		t.Errorf("the memory snapshot: %v", e)
	}
	l, err := seslog.Open(filepath.Join(s.dir, sessionsDir, s.box.ID, s.session), seslog.Options{})
	s.must(err)
	defer l.Close()
	if l.Written() != uint64(len("first\n")) {
		t.Errorf("the log has %d bytes", l.Written())
	}
	// The state directory that it was made of lost nothing, and can be removed.
	old, err := snapshot.Open(filepath.Join(s.dir+".old", snapshotsDir))
	s.must(err)
	if _, err := old.Verify(t.Context(), s.memory); err != nil {
		t.Error(err)
	}
}

// TestSecrets: nothing that opens a door is in a backup unless it is asked for,
// and machines never are.
func TestSecrets(t *testing.T) {
	s := newState(t)
	plain, _ := s.backup(false)
	full, r := s.backup(true)
	if !r.Keys || r.Snapshots != 2 || len(r.LeftOut) != 0 {
		t.Errorf("%+v", r)
	}
	for _, names := range [][]string{{"admin.key"}, {"token.key"}, {snapshotsDir, s.memory, describes}, {artifactsDir, s.engine}} {
		if has(plain, names...) || !has(full, names...) {
			t.Errorf("%v: %v without keys, %v with them", names, has(plain, names...), has(full, names...))
		}
	}
	if n, _ := filepath.Glob(filepath.Join(full, artifactsDir, "*", "*")); len(n) != 2+4 {
		t.Errorf("artifacts %v", n)
	}
	for _, dir := range []string{plain, full} {
		if has(dir, "machines") {
			t.Error("a machine's journal is in a backup")
		}
		s.must(filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if i, ierr := d.Info(); ierr != nil || i.Mode().Perm()&0o022 != 0 || d.IsDir() && i.Mode().Perm() != 0o700 {
				t.Errorf("%s has mode %v", path, i.Mode())
			}
			return err
		}))
		if _, err := Verify(t.Context(), dir); err != nil {
			t.Error(err)
		}
	}
}

// TestFirecracker: what was installed is in a backup, and what of it is damaged or
// gone is told.
func TestFirecracker(t *testing.T) {
	s := newState(t)
	dir, r := s.backup(false)
	store, err := artifact.Open(filepath.Join(dir, artifactsDir))
	s.must(err)
	copied := installed.Open(dir, store)
	if sel, err := copied.Selection(); err != nil || sel.Kernel != "linux-6.1" {
		t.Errorf("%+v, %v", sel, err)
	}
	if kernels, err := copied.Kernels(); err != nil || len(kernels) != 1 {
		t.Errorf("%+v, %v", kernels, err)
	}
	for _, hash := range []string{s.pair.Firecracker, s.pair.Jailer} {
		if !has(dir, artifactsDir, hash, "tool") {
			t.Errorf("%s is not in it", hash)
		}
	}
	if _, ok := r.Missing["firecracker"]; ok {
		t.Errorf("%v", r.Missing)
	}
	s.must(os.WriteFile(filepath.Join(s.dir, "firecracker", "kernels", "other.json"), []byte("{"), 0o600))
	s.must(os.RemoveAll(filepath.Join(s.dir, artifactsDir, s.pair.Jailer)))
	dir, r = s.backup(false)
	if r.Missing["firecracker"] == "" || r.Missing["artifact "+s.pair.Jailer] == "" || !has(dir, "firecracker", "versions", "1.15.1.json") {
		t.Errorf("%v", r.Missing)
	}
}

func TestVerifyFindsDamage(t *testing.T) {
	s := newState(t)
	for name, harm := range map[string]func(dir string) error{
		"a changed byte": func(dir string) error {
			path := filepath.Join(dir, storeName)
			data, err := os.ReadFile(path)
			s.must(err)
			data[len(data)/2] ^= 1
			return os.WriteFile(path, data, 0o600)
		},
		"a missing file": func(dir string) error { return os.Remove(filepath.Join(dir, snapshotsDir, s.disk, "disk.img")) },
		"a longer file": func(dir string) error {
			f, err := os.OpenFile(filepath.Join(dir, sessionsDir, s.box.ID, s.session, "meta.json"), os.O_APPEND|os.O_WRONLY, 0)
			s.must(err)
			_, err = f.WriteString(" ")
			return errors.Join(err, f.Close())
		},
		"another file": func(dir string) error { return os.WriteFile(filepath.Join(dir, "admin.key"), nil, 0o600) },
		"a link": func(dir string) error {
			path := filepath.Join(dir, storeName)
			return errors.Join(os.Rename(path, dir+".db"), os.Symlink(dir+".db", path))
		},
		"a changed manifest": func(dir string) error {
			path := filepath.Join(dir, manifestName)
			data, err := os.ReadFile(path)
			s.must(err)
			return os.WriteFile(path, bytes.Replace(data, []byte(`"keys":false`), []byte(`"keys":true`), 1), 0o600)
		},
	} {
		dir, _ := s.backup(false)
		s.must(harm(dir))
		if _, err := Verify(t.Context(), dir); !sandbox.IsClass(err, sandbox.FailedPrecondition) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Verify(t.Context(), t.TempDir()); !sandbox.IsClass(err, sandbox.NotFound) {
		t.Errorf("no backup: %v", err)
	}
}

func TestRefusals(t *testing.T) {
	s := newState(t)
	there := t.TempDir()
	for _, c := range []struct {
		state, to string
		class     sandbox.Class
	}{
		{s.dir, there, sandbox.Conflict},
		{s.dir, filepath.Join(s.dir, "backup"), sandbox.Invalid},
		{there, filepath.Join(there+"x", "..", "none"), sandbox.NotFound},
	} {
		if _, err := Write(t.Context(), Options{StateDir: c.state, To: c.to}); !sandbox.IsClass(err, c.class) {
			t.Errorf("%s to %s: %v", c.state, c.to, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Write(ctx, Options{StateDir: s.dir, To: filepath.Join(there, "b")}); err == nil {
		t.Error("a cancelled backup succeeded")
	}
	if list, err := os.ReadDir(there); err != nil || len(list) != 0 {
		t.Errorf("a failed backup left %v (%v)", list, err)
	}
}

// TestLaterPass: what the rows of a later pass name no more is not in the
// backup, and what was brought is not brought twice.
func TestLaterPass(t *testing.T) {
	s := newState(t)
	w := &writer{ctx: t.Context(), from: s.dir, to: t.TempDir(), files: map[string]file{}, linked: map[string]bool{}}
	r := Report{Keys: true, Missing: map[string]string{}}
	both := rows{
		templates: map[string]bool{s.digest: true},
		snapshots: map[string]sandbox.SnapshotKind{s.disk: sandbox.SnapshotDisk, s.memory: sandbox.SnapshotMemory},
	}
	for range 2 {
		s.must(errors.Join(w.templates(both, &r), w.snapshots(both, &r)))
		if r.Snapshots != 2 || r.Templates != 1 || len(r.Missing) != 0 {
			t.Errorf("%+v", r)
		}
	}
	less := rows{snapshots: map[string]sandbox.SnapshotKind{s.memory: sandbox.SnapshotMemory}}
	s.must(errors.Join(w.templates(less, &r), w.snapshots(less, &r)))
	if r.Snapshots != 1 || r.Templates != 0 || has(w.to, snapshotsDir, s.disk) || !has(w.to, snapshotsDir, s.memory) {
		t.Errorf("%+v", r)
	}
	for path := range w.files {
		if strings.Contains(path, s.disk) || within(path, templatesDir) || !has(w.to, path) {
			t.Errorf("the manifest names %s", path)
		}
	}
}

// TestSpread copies a file with holes, as where no link can be made.
func TestSpread(t *testing.T) {
	dir := t.TempDir()
	src := filepath.Join(dir, "src")
	f, err := os.OpenFile(src, os.O_CREATE|os.O_RDWR, 0o444)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, at := range []int64{1 << 20, 9 << 20} {
		if _, err := f.WriteAt([]byte("data"), at); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Truncate(32 << 20); err != nil {
		t.Fatal(err)
	}
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	w := &writer{ctx: t.Context()}
	if err := w.spread(src, src+"2", st); err != nil {
		t.Fatal(err)
	}
	a, err := os.ReadFile(src)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(src + "2")
	if err != nil || !bytes.Equal(a, b) {
		t.Errorf("%d and %d bytes (%v)", len(a), len(b), err)
	}
	if st, err := os.Stat(src + "2"); err != nil || st.Mode().Perm() != 0o444 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
}
