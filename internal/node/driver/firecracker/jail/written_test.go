package jail

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// TestAFileThatIsWrittenToIsNotTaken has a VMM keep what it could go on writing
// with: its memory would be changed in a fork that has not come to it.
func TestAFileThatIsWrittenToIsNotTaken(t *testing.T) {
	for name, c := range map[string]struct {
		keep  func(t *testing.T, f *os.File) (letGo func())
		short bool // it is let go of in time
		taken bool
	}{
		"nothing":                  {keep: closed, taken: true},
		"a descriptor":             {keep: kept},
		"a mapping":                {keep: func(t *testing.T, f *os.File) func() { _, letGo := mapped(t, f); return letGo }},
		"a descriptor for a while": {keep: kept, short: true, taken: true},
	} {
		j := made(t)
		room, path := roomWith(t, j)
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		letGo := c.keep(t, f)
		done := make(chan struct{})
		go func() {
			defer close(done)
			if c.short {
				time.Sleep(5 * writersWait)
				letGo()
			}
		}()
		to := t.TempDir()
		if err := room.Take(context.Background(), "mem", to, 0o444); (err == nil) != c.taken {
			t.Errorf("%s: %v", name, err)
		}
		if left, err := os.ReadDir(to); err != nil || (len(left) == 1) != c.taken {
			t.Errorf("%s: in the image are %v, %v", name, left, err)
		}
		if <-done; !c.short {
			letGo()
		}
	}
	// Whoever does not wait.
	j := made(t)
	room, path := roomWith(t, j)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := room.Take(ctx, "mem", t.TempDir(), 0o444); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
}

// TestOnAnOverlayAFileIsCopied where no lease tells of a mapping.
func TestOnAnOverlayAFileIsCopied(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	merged := filepath.Join(dir, "merged")
	options := "lowerdir=" + filepath.Join(dir, "lower") + ",upperdir=" + filepath.Join(dir, "upper") + ",workdir=" + filepath.Join(dir, "work")
	if err := syscall.Mount("overlay", merged, "overlay", 0, options); err != nil {
		t.Skipf("SKIP: an overlay can't be mounted here: %v", err)
	}
	defer func() {
		if err := syscall.Unmount(merged, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	room, path := roomWith(t, madeIn(t, merged))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	write, letGo := mapped(t, f)
	defer letGo()
	if err := room.Take(context.Background(), "mem", merged, 0o444); err != nil {
		t.Fatal(err)
	}
	write()
	data, err := os.ReadFile(filepath.Join(merged, "mem"))
	if err != nil || string(data) != "memory" {
		t.Errorf("after it was taken it holds %q, %v", data, err)
	}
	if st, raw := look(t, filepath.Join(merged, "mem")); st.Mode() != 0o444 || raw.Uid != 0 {
		t.Errorf("it is %v of %d", st.Mode(), raw.Uid)
	}
}

// roomWith makes a room in which a VMM has left its memory.
func roomWith(t *testing.T, j *Jail) (room *Room, path string) {
	t.Helper()
	room, err := j.MakeRoom("snap", user)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := room.Close(); err != nil {
			t.Error(err)
		}
	})
	path = filepath.Join(j.root(), "snap", "mem")
	if err := errors.Join(os.WriteFile(path, []byte("memory"), 0o600), os.Chown(path, user, user)); err != nil {
		t.Fatal(err)
	}
	return room, path
}

// The things that a VMM may keep of a file that it has open, and how it lets go of
// them.

func closed(t *testing.T, f *os.File) (letGo func()) {
	t.Helper()
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return func() {}
}

func kept(_ *testing.T, f *os.File) (letGo func()) { return func() { _ = f.Close() } }

// mapped keeps a mapping alone.
func mapped(t *testing.T, f *os.File) (write, letGo func()) {
	t.Helper()
	m, err := syscall.Mmap(int(f.Fd()), 0, 6, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err = errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	return func() { copy(m, "other") }, func() { _ = syscall.Munmap(m) }
}
