package driver

import (
	"slices"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// Missing answers Restorer.Missing for the driver called name, whose disk images
// any version of it reads, and whose memory images are for the very engine that
// wrote them, which engine looks for, and for a processor with the same features.
func Missing(name string, needs sandbox.Needs, engine func() error) error {
	if needs.Driver != name {
		return sandbox.Errorf(sandbox.FailedPrecondition, "needs_driver", "the snapshot is for the driver %q, not %q", needs.Driver, name)
	}
	if needs.Engine == "" {
		return nil
	}
	if err := engine(); err != nil {
		return err
	}
	have, err := sys.CPUFeatures()
	if err != nil {
		return err
	}
	var missing []string
	for _, f := range needs.CPU {
		if _, ok := slices.BinarySearch(have, f); !ok {
			missing = append(missing, f)
		}
	}
	if len(missing) > 0 {
		return sandbox.Errorf(sandbox.FailedPrecondition, "needs_cpu", "the snapshot was taken on a processor with features that this one lacks: %s", strings.Join(missing, " ")).
			WithHint("restore it on a host like the one where it was taken")
	}
	return nil
}
