// Package firecracker is the driver that runs machines as Firecracker microVMs,
// each in a jail of its own (package jail). It speaks to the VMM through its API
// socket (package vmm), boots the guest kernel that is installed (package
// installed) with an initramfs that carries the guest binary (package kernel),
// and leaves the rest to the guest: what /init needs is in the kernel command
// line (guestapi.Boot), and the agent dials the host over vsock.
//
// What a machine leaves on the host, and Discard removes by its id alone:
//
//	STATE/machines/ID/firecracker   its record, disk, log and jail
//	STATE/firecracker/uids/N        a link to its id: the user id of the jail
//	the cgroup /cloche-INSTANCE/ID  with the VMM's process ("_" as "-")
//
// INSTANCE comes from the state directory, as in the gVisor driver. What all
// machines share, and a later start makes again where it is missing:
//
//	STATE/firecracker/initrd   initramfs, one for each kernel and guest binary
//	STATE/firecracker/disks    formatted, empty disks, one for each size
//
// A VMM is as hostile as its guest, which may have taken it over: what it
// answers, writes and leaves in its jail is bounded and never trusted by name.
//
// Memory. The guest has exactly its limit as RAM, less what its kernel keeps.
// The host's limit is higher by what the VMM needs and by a share for the page
// cache of the machine's own disk.
//
// CPU. A machine's share holds from when its guest has booted, or, after a
// restore, a moment after its agent has dialled. Until then it has whole cores, so
// that a small share does not make a kernel take a minute.
//
// Time. Nothing on the way to a running machine sleeps for a fixed while: the
// kernel tells when the jailer ends and when the guest dials. Only that a VMM
// listens at its socket nothing tells; it is tried each millisecond.
//
// A VMM answers one request after the other, so one that writes an image answers
// nothing for minutes. That it may be doing so is noted before it is asked to: who
// finds it later neither takes it for dead nor waits for it (record.writing).
//
// The node calls it.
package firecracker
