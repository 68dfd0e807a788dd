package server

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
)

// TestWhatCantBeAssembledIsAnError: whatever of the state directory is in the way,
// the daemon says so and closes what it had opened.
func TestWhatCantBeAssembledIsAnError(t *testing.T) {
	for _, name := range []string{"cloche.db", "templates", "sessions", "artifacts", "secret.key"} {
		dir := t.TempDir()
		o := Options{Listen: "127.0.0.1:0", StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Log: slog.New(slog.DiscardHandler)}
		in := filepath.Join(o.StateDir, name)
		var err error
		if name == "cloche.db" || name == "secret.key" {
			err = os.MkdirAll(filepath.Join(in, "x"), 0o700)
		} else if err = os.MkdirAll(o.StateDir, 0o700); err == nil {
			err = os.WriteFile(in, []byte("x"), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := assemble(t.Context(), o); err == nil {
			t.Errorf("%s is in the way, and the daemon is assembled", name)
		}
	}
}
