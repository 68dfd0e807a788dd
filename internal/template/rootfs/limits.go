package rootfs

import (
	"cloche.dev/cloche/internal/sandbox"
)

// Limits bound what one import may take. A zero field takes its default.
type Limits struct {
	Entries     int   // files, directories and links; also of headers read
	DataBytes   int64 // sum of the files' sizes, holes included
	StreamBytes int64 // of the tar, uncompressed
	NameBytes   int64 // of all names and link targets together: they stay in memory
	Ratio       int64 // uncompressed to compressed, once ratioGrace bytes came out
}

// DefaultLimits are generous for a root filesystem and harmless for a host.
var DefaultLimits = Limits{
	Entries:     2_000_000,
	DataBytes:   16 << 30,
	StreamBytes: 20 << 30,
	NameBytes:   256 << 20,
	Ratio:       200,
}

// ratioGrace is how much any tar may expand to before its ratio counts.
const ratioGrace = 256 << 20

const (
	maxPath     = 4096 // bytes of a name or a hard link's target, as PATH_MAX
	maxDepth    = 2048 // directories above an entry: what maxPath can hold
	maxLinkHops = 40   // symbolic links followed for one name, as Linux does
)

func (l Limits) withDefaults() Limits {
	d := DefaultLimits
	if l.Entries > 0 {
		d.Entries = l.Entries
	}
	if l.DataBytes > 0 {
		d.DataBytes = l.DataBytes
	}
	if l.StreamBytes > 0 {
		d.StreamBytes = l.StreamBytes
	}
	if l.NameBytes > 0 {
		d.NameBytes = l.NameBytes
	}
	if l.Ratio > 0 {
		d.Ratio = l.Ratio
	}
	return d
}

// The kinds in Tree.Dropped.
const (
	DroppedDevice = "device" // the sandbox has its own /dev
	DroppedXattr  = "xattr"  // extended attributes and ACLs, counted each
	DroppedTime   = "mtime"  // times outside of what filesystems hold, moved to the nearest
)

// refuse makes the error for a tar that can't be a template.
func refuse(code, format string, args ...any) *sandbox.Error {
	return sandbox.Errorf(sandbox.Invalid, code, format, args...)
}

func tooLarge(what string, limit int64) *sandbox.Error {
	return refuse("tar_too_large", "the tar has more than %d %s", limit, what).
		WithHint("leave out what a template doesn't need, or raise the limit on this host")
}

// quoted shortens a hostile name for a message.
func quoted(name string) string {
	const most = 120
	if len(name) > most {
		return name[:most] + "…"
	}
	return name
}
