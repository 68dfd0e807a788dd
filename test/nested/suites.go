package nested

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"cloche.dev/cloche/internal/node/driver/drivertest"
)

// Suite is a choice of one package's tests; it runs in an L1 of its own.
type Suite struct {
	Name        string // of its logs
	Package     string // import path
	Part        string // which part of the package's tests it is; "" where it is the only one
	Firecracker bool   // needs the real one
	Run         string // a -test.run
	Skip        string // a -test.skip
	Whole       bool   // it needs cloche itself, as it was built, and the kernel's package
	Faults      bool   // it needs that cloche which can be killed at its failpoints
	MemoryMiB   int    // of L1; 0 is L1's default
	Files       Tree   // in L1, beside what is in every one
	Env         []string
	// Time bounds the tests, as go test's own time-out, which prints where they
	// stood. L1 itself gets a minute more.
	Time time.Duration
}

const (
	module      = "cloche.dev/cloche/"
	firecracker = module + "internal/node/driver/firecracker"
	gvisor      = module + "internal/node/driver/gvisor"
)

// longTests are those of the driver's own that have an L1 to themselves.
const longTests = "TestForks|TestUnseededForks|TestCycles|TestRatios"

// batch is how many subtests one L1 runs. An L1 takes seconds to boot and now
// and then one freezes, which costs what it has run: more than a few minutes'
// worth shall not be lost.
const batch = 12

// smoke is the suite that shows that there is an L1 at all.
var smoke = Suite{Name: "smoke", Package: module + "test/nested/smoke", Firecracker: true, Run: ".", Time: 10 * time.Minute}

// life is the whole of Cloche, as it was built.
var life = Suite{
	Name: "life", Package: module + "test/nested/life", Part: "one life", Firecracker: true, Whole: true, Run: "^TestFirecrackerServes$", MemoryMiB: 4096,
	Time: 20 * time.Minute,
}

// killed is the daemon, killed at each of its steps.
var killed = Suite{
	Name: "killed", Package: module + "test/nested/life", Part: "killed at each step", Firecracker: true, Faults: true, Run: "^TestFirecrackerKilled$", MemoryMiB: 4096,
	Env: []string{"CLOCHE_TEST_FAULTS=1"}, Time: time.Hour,
}

// boot is what /init does of its own, from a bad disk to a kernel's panic.
var boot = Suite{Name: "boot", Package: module + "internal/guest/boot", Firecracker: true, Run: "Firecracker", Time: 15 * time.Minute}

// All are what `make e2e-firecracker` runs, in that order.
func All() []Suite {
	return slices.Concat(
		[]Suite{smoke, boot},
		batches("firecracker", firecracker, "^TestConformance$/^firecracker$", contract()),
		[]Suite{life, killed, {
			Name: "firecracker-own", Package: firecracker, Part: "its own tests", Firecracker: true, Run: ".",
			Skip: "^(TestConformance|TestBrokenDrivers|" + longTests + ")$", Time: time.Hour,
		}, {
			Name: "firecracker-forks", Package: firecracker, Part: "forks, cycles and times", Firecracker: true,
			Run: "^(" + longTests + ")$", Time: time.Hour,
		}},
		batches("firecracker-broken", firecracker, "^TestBrokenDrivers$/^firecracker$", faults()),
		batches("gvisor", gvisor, "^TestConformance$/^gvisor$", contract()),
	)
}

// CI are what it runs with PART=ci: no more than 12 minutes on two processors,
// of which two go into installing and building.
func CI() []Suite {
	return slices.Concat(
		[]Suite{smoke},
		batches("firecracker", firecracker, "^TestConformance$/^firecracker$", ciFirecracker),
		batches("gvisor", gvisor, "^TestConformance$/^gvisor$", ciGVisor),
	)
}

// ciFirecracker are the clauses that hang on the virtual machine, its jail and
// cgroup v2. What commands, streams and files do the same agent shows on gVisor in
// the suite drivertest; how a driver refuses and cleans up, the driver's own tests
// show on any machine, with the real binary.
var ciFirecracker = []string{
	"create-dials", "pid-1", "root-is-image", "disk-quota", "memory-seen", "cpu-limit", "network-interfaces", "network-gateway", "kill", "killed-outside",
	"adopt", "list",
	"pause", "snapshot-goes-on", "restore", "restore-identity", "restore-needs", "frozen", "fork-random", "disk-restore", "disk-unsynced",
	"reboot-refused", "discard-live", "descriptors-not-inherited",
}

// ciGVisor are the clauses that need control groups, whose other version the
// suite drivertest has on hosts with the first.
var ciGVisor = []string{"memory-seen", "memory-excess", "kill", "killed-outside", "list", "discard-live", "pause", "stats"}

func contract() (names []string) {
	for _, c := range drivertest.Contract {
		names = append(names, c.Name)
	}
	return names
}

func faults() (names []string) {
	for _, f := range drivertest.Faults {
		names = append(names, f.Name)
	}
	return names
}

// batches makes suites of the subtests names of parent.
func batches(name, pkg, parent string, names []string) (suites []Suite) {
	of := (len(names) + batch - 1) / batch
	for some := range slices.Chunk(names, batch) {
		quoted := make([]string, len(some))
		for i, n := range some {
			quoted[i] = regexp.QuoteMeta(n)
		}
		n := len(suites) + 1
		suites = append(suites, Suite{
			Name: fmt.Sprintf("%s-%d", name, n), Package: pkg, Part: fmt.Sprintf("%s %d of %d", name, n, of), Firecracker: pkg == firecracker,
			Run: parent + "/^(" + strings.Join(quoted, "|") + ")$", Time: 45 * time.Minute,
		})
	}
	return suites
}

// Args is the command line of the suite's tests, whose program test is. They print
// the lines of -v, those of subtests as they end and not after the test above
// them, each with a mark before it.
func (s Suite) Args(test string) []string {
	return []string{
		test, "-test.v=test2json", "-test.count=1", "-test.timeout=" + s.Time.String(), "-test.run=" + s.Run, "-test.skip=" + s.Skip,
	}
}

// Title is the package as reports name it.
func (s Suite) Title() string {
	if s.Part == "" {
		return s.Package
	}
	return s.Package + " (" + s.Part + ")"
}
