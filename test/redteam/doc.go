// Package redteam tries every known way out of a sandbox, as root inside one,
// against stand-ins for the world (package internet) that note all that
// arrives. Each technique must be stopped and it must be known how: by the
// reason in the gateway's audit, by a named counter of the kernel's, or by the
// sandbox's own kernel. Each has a control, which is the same attempt where no
// rule is in its way, or says why it can have none; and a gateway that was
// weakened on purpose (build tag clocheweak) must let the right ones through.
//
// A technique is a dozen lines in one of the tables. What gVisor itself refuses
// to send (raw and packet sockets, so spoofed sources, ARP, fragments, IPv6 and
// its router advertisements, data in a SYN) is sent by a packet socket from the
// machine's end of the link, in the tests of internal/node/netns.
//
// make redteam runs it.
package redteam
