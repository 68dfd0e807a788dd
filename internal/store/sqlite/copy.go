package sqlite

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"cloche.dev/cloche/internal/sandbox"
)

// Copy is Backup of the store at from, which a daemon may have open. It does
// not migrate it, so that a newer program can copy what an older daemon keeps.
func Copy(ctx context.Context, from, to string) error {
	from = filepath.Clean(from)
	if _, err := os.Stat(from); errors.Is(err, fs.ErrNotExist) {
		return sandbox.Errorf(sandbox.NotFound, "no_store", "there is no store %s", from).
			WithHint("--state-dir names the daemon's state directory")
	} else if err != nil {
		return openError(from, err)
	}
	return (&Store{path: from}).Backup(ctx, to)
}
