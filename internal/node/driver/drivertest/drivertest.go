// Package drivertest is the conformance suite of machine drivers: a list of
// named clauses, the contract, each with the test that holds a driver to it.
// It knows nothing of any one way of isolation; what differs between drivers
// is in the Harness. What runs inside a machine is the real guest, spoken to
// through guestlink, and a small program of the suite's own.
//
// Invariants: every clause makes its own machines and leaves none; a clause is
// worth nothing until something fails it, so Faults lists drivers and guests
// that are broken on purpose, each with the clause that must notice.
//
// The drivers' tests call Run, RunFaults and RunBroken. They need root, and for
// Prepare mkfs.erofs and the go command; Prebuilt needs neither.
package drivertest

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/driver"
)

// TB is what a clause needs of a test. *testing.T is one.
type TB interface {
	Helper()
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// Networks makes the network namespaces of the suite's machines, and opens the
// sockets at the other end.
type Networks interface {
	Create(ctx context.Context, id string) (path string, err error)
	Sockets(ctx context.Context, id string) (proxy, dnsTCP, dnsUDP *os.File, err error)
	Counters(ctx context.Context, id string) (map[string]uint64, error)
	Delete(ctx context.Context, id string) error
}

// Harness is a driver under test.
type Harness struct {
	// Name is the name that the driver must have.
	Name string
	// Open makes a driver over the same directories each time. What it
	// returns beside it ends the driver as the end of its process would,
	// leaving its machines alone.
	Open func() (d driver.Driver, shut func(context.Context) error, err error)
	// Files are the guest and the image; Prepare makes them.
	Files    Files
	Networks Networks
	// HostPIDs lists the host processes of a machine. The death of the first
	// must end the machine.
	HostPIDs func(id string) ([]int, error)
	// Leftovers describes whatever is on the host of a machine: processes,
	// mounts, control groups, files.
	Leftovers func(id string) ([]string, error)

	// What differs between ways of isolation, or hosts, and the contract does not
	// rule. The zero values are gVisor's.

	// Pace is how many times longer than on an ordinary host things may take; 0
	// is 1. Virtual machines under emulation need it.
	Pace int
	// Mortal changes a spec so that its guest's PID 1 ends by itself, soon after
	// it was started. nil: the suite's own program stands in for the guest, which
	// where the guest also boots the machine it can't.
	Mortal func(*driver.Spec)
	// Damage breaks an image whose files are in dir. nil: it halves what is of
	// middling size, which is there where an image is a few files of that.
	Damage func(dir string) error
	// NoInterface says that machines have no eth0 yet.
	NoInterface bool

	wrap       func(driver.Driver) driver.Driver // breaks it
	supervisor map[string]string
}

// Clause is one sentence of the contract.
type Clause struct {
	Name string // of the subtest
	Text string // what holds
	test func(*bench)
}

// clauseTimeout bounds one clause, including the end of what it leaves.
const clauseTimeout = 60 * time.Second

// Contract is the whole contract, in the order in which it is tested.
var Contract = concat(lifeClauses, createClauses, diskClauses, boundClauses, networkClauses, processClauses, streamClauses,
	agentClauses, endClauses, adoptClauses, discardClauses, pauseClauses, memoryClauses, forkClauses, diskImageClauses, hostileClauses, tidyClauses)

func concat(lists ...[]Clause) []Clause {
	var all []Clause
	for _, l := range lists {
		all = append(all, l...)
	}
	return all
}

// Run holds a driver to the contract, one subtest for each clause.
func Run(t *testing.T, h Harness) {
	for _, c := range Contract {
		t.Run(c.Name, func(t *testing.T) {
			if err := check(t, h, c); err != nil {
				t.Errorf("after the clause: %v", err)
			}
			if t.Failed() {
				t.Logf("the contract says: %s", c.Text)
			}
		})
	}
}

// check tests one clause. Its error is about what the clause left behind.
func check(t TB, h Harness, c Clause) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), h.slowly(clauseTimeout))
	defer cancel()
	b := &bench{TB: t, h: h, ctx: ctx}
	defer func() { err = b.clean() }()
	if b.d = b.open(); b.d != nil {
		c.test(b)
	}
	return nil
}

// recorder is a test that notes whether it failed.
type recorder struct{ failures []string }

// Helper implements TB.
func (*recorder) Helper() {}

// Logf implements TB.
func (*recorder) Logf(string, ...any) {}

// Errorf implements TB.
func (r *recorder) Errorf(format string, args ...any) {
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

// Fatalf implements TB.
func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	runtime.Goexit()
}

// verdict tests one clause on the side and returns how it failed.
func verdict(h Harness, c Clause) (failures []string, left error) {
	r := new(recorder)
	done := make(chan struct{})
	go func() {
		defer close(done)
		left = check(r, h, c)
	}()
	<-done
	return r.failures, left
}
