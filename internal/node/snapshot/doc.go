// Package snapshot keeps the files of snapshots on this host: what drivers
// write, and beside it a manifest that says what it is and what it needs.
//
// Invariants: what bears a snapshot's id was complete, hashed and durable
// before it had that name; what does not is a temporary one, and rubbish once no
// process writes it. A snapshot is never changed. It is verified before use:
// its files are hashed again unless their stamps (sys.FileStamp) are what was
// recorded when they were known to be good. A snapshot that fails is refused
// with a code that says why, and is not removed by that: somebody may want to
// look. Everything is 0600 below 0700 directories, since memory, environments
// and the guest's key are in it, but for what a driver made 0444, since a jail
// is to read it through a hard link: the directories hide that from others.
//
// On disk: DIR/ID/{manifest.json, stamps.json, the driver's files}, and
// DIR/.tmp-* for what is being made or removed. Only internal/node calls it.
package snapshot
