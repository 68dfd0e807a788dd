package house

import (
	"go/ast"
	"path"
	"slices"
	"sort"
	"strings"
	"testing"
)

const module = "cloche.dev/cloche/"

// room is one row of the table of arrows: what the packages below a path may
// import of ours, beside each other. Every room may import internal/sandbox.
type room struct {
	path string
	may  []string
}

// rooms is the table of arrows. The longest path that a package lies under is
// its room; a package in no room is an error, so that a new one comes with its
// arrows. "…" is everything of ours but cmd.
var rooms = []room{
	{"internal/sandbox", nil},
	{"internal/sys", nil},
	{"internal/failpoint", nil},
	{"internal/guestapi", nil},
	{"internal/guest", []string{"internal/guestapi"}},
	{"internal/engine", []string{"internal/node/driver/gvisor/enginerpc", "internal/node/cgroup", "internal/sys"}},

	{"internal/node/driver", []string{"internal/sys"}},
	{"internal/node/driver/drivertest", []string{"internal/node/driver", "internal/node/guestlink", "internal/guestapi"}},
	{"internal/node/driver/gvisor", []string{
		"internal/node/driver", "internal/node/driver/gvisor/enginerpc", "internal/node/artifact", "internal/node/cgroup", "internal/sys",
	}},
	{"internal/node/driver/gvisor/enginerpc", []string{"internal/sys"}},
	{"internal/node/driver/firecracker", []string{
		"internal/node/driver", "internal/node/driver/firecracker/installed", "internal/node/driver/firecracker/jail", "internal/node/driver/firecracker/kernel",
		"internal/node/driver/firecracker/vmm", "internal/guestapi", "internal/node/cgroup", "internal/sys", "internal/failpoint",
	}},
	{"internal/node/driver/firecracker/jail", []string{"internal/node/cgroup", "internal/sys"}},
	{"internal/node/driver/firecracker/kernel", nil},
	{"internal/node/driver/firecracker/vmm", nil},
	{"internal/node/driver/firecracker/installed", []string{"internal/node/driver/firecracker/vmm", "internal/node/artifact", "internal/sys"}},
	{"internal/node/artifact", []string{"internal/sys"}},
	{"internal/node/cgroup", []string{"internal/sys"}},
	{"internal/node/guestlink", []string{"internal/guestapi", "internal/sys"}},
	{"internal/node/netns", []string{"internal/sys"}},
	{"internal/node/session", []string{"internal/guestapi", "internal/sys", "internal/failpoint"}},
	{"internal/node/snapshot", []string{"internal/sys", "internal/failpoint"}},
	{"internal/node", []string{
		"internal/node/driver", "internal/node/snapshot", "internal/failpoint", "internal/node/artifact", "internal/node/cgroup", "internal/node/guestlink", "internal/node/netns",
		"internal/node/session", "internal/guestapi", "internal/sys", "internal/trust",
	}},

	{"internal/egress/audit", []string{"internal/sys"}},
	{"internal/egress/policy", nil},
	{"internal/egress/dial", []string{"internal/egress/policy"}},
	{"internal/egress/resolve", []string{"internal/egress/policy", "internal/egress/audit"}},
	{"internal/egress/ca", nil},
	{"internal/egress/inject", nil},
	{"internal/egress/oauth", nil},
	{"internal/egress/proxy", []string{"internal/egress/policy", "internal/egress/dial", "internal/egress/ca", "internal/egress/inject", "internal/egress/audit", "internal/egress/weak", "internal/sys"}},
	{"internal/egress/weak", nil},
	{"internal/egress/gatewayrpc", []string{"internal/egress/audit", "internal/sys"}},
	{"internal/egress", []string{
		"internal/egress/audit", "internal/egress/policy", "internal/egress/dial", "internal/egress/resolve", "internal/egress/ca", "internal/egress/inject",
		"internal/egress/proxy", "internal/egress/gatewayrpc", "internal/egress/weak", "internal/sys",
	}},
	{"internal/node/egress", []string{"internal/egress/audit", "internal/egress/gatewayrpc", "internal/egress/weak", "internal/sys"}},
	{"internal/trust", nil},
	{"internal/vault", []string{"internal/sys"}},

	{"internal/template", []string{"internal/sys"}},
	{"internal/auth", nil},
	{"internal/control", []string{"internal/failpoint"}},
	{"internal/store", []string{"internal/failpoint"}},
	{"internal/metrics", nil},

	{"api", nil},
	{"client", []string{"api"}},
	{"internal/httpapi", []string{"api", "internal/auth", "internal/control", "internal/httpapi/rest"}},
	{"internal/httpapi/rest", []string{"api", "internal/auth"}},
	{"internal/dataplane", []string{"api", "internal/auth", "internal/httpapi/rest", "internal/guestapi", "internal/node/session"}},
	{"internal/server", []string{"…"}},

	{"cmd/cloche", []string{
		"internal/server", "internal/doctor", "client", "api", "internal/egress",
		"internal/node/artifact", "internal/node/driver/firecracker/installed", "internal/node/driver/firecracker/kernel", // the commands that install
	}},
	{"cmd/cloche-gvisor", []string{"internal/engine"}},
	{"cmd/cloche-guest", []string{"internal/guest"}},

	{"internal/doctor", []string{"internal/sys", "internal/node/driver"}},
	{"internal/house", nil},
	{"test", []string{"…"}},
}

// fenced are packages of others that only the named rooms import.
var fenced = map[string][]string{
	"gvisor.dev/gvisor":             {"internal/engine", "cmd/cloche-gvisor"},
	"golang.org/x/sys/unix":         {"internal/sys", "internal/engine", "internal/guest"},
	"modernc.org/sqlite":            {"internal/store/sqlite"},
	"github.com/vishvananda":        {"internal/node/netns", "internal/engine", "internal/guest", "test/internet"},
	"github.com/google/nftables":    {"internal/node/netns", "test/internet"},
	"github.com/mdlayher/netlink":   {"internal/node/netns"},
	"github.com/miekg/dns":          {"internal/egress/resolve", "test"},
	"software.sslmate.com":          {"internal/trust", "internal/guest"},
	"github.com/spf13/cobra":        {"cmd/cloche"},
	"github.com/oapi-codegen":       {"api", "client", "internal/httpapi", "internal/dataplane"},
	"github.com/coder/websocket":    {"internal/dataplane", "client"},
	"github.com/pressly/goose":      {"internal/store"},
	"connectrpc.com/connect":        {"internal/guestapi", "internal/guest", "internal/node", "internal/dataplane"},
	"github.com/creack/pty":         {"internal/guest"},
	"github.com/prometheus":         {"internal/metrics"},
	"google.golang.org/protobuf":    {"internal/guestapi", "internal/guest", "internal/node", "internal/dataplane"},
	"github.com/google/subcommands": {"internal/engine"},
}

// under tells whether a package is dir or lies below it.
func under(pkg, dir string) bool { return pkg == dir || strings.HasPrefix(pkg, dir+"/") }

func roomOf(pkg string) (room, bool) {
	var best room
	found := false
	for _, r := range rooms {
		if under(pkg, r.path) && (!found || len(r.path) > len(best.path)) {
			best, found = r, true
		}
	}
	return best, found
}

// mayImport tells whether a package of ours may import another of ours.
func mayImport(pkg, imported string) bool {
	r, ok := roomOf(pkg)
	if !ok || under(imported, "cmd") && !under(pkg, r.path) {
		return false
	}
	if other, ok := roomOf(imported); ok && other.path == r.path {
		return !under(imported, "cmd") || under(imported, r.path)
	}
	if imported == "internal/sandbox" {
		return true
	}
	for _, m := range r.may {
		if m == "…" && !under(imported, "cmd") {
			return true
		}
		if o, ok := roomOf(imported); ok && o.path == m || imported == m {
			return true
		}
	}
	return false
}

// TestArrows holds every file but tests to the table. A test may import what
// it tests against, but no command.
func TestArrows(t *testing.T) {
	for _, f := range sources(t) {
		pkg := path.Dir(f.name)
		if _, ok := roomOf(pkg); !ok {
			t.Errorf("%s: package %s is in no room: give it a row in the table of arrows", f.name, pkg)
			continue
		}
		for _, imp := range f.imports {
			ours, isOurs := strings.CutPrefix(imp, module)
			switch {
			case isOurs && f.test:
				if under(ours, "cmd") && !under(pkg, "cmd") {
					t.Errorf("%s imports the command %s", f.name, ours)
				}
			case isOurs:
				if !mayImport(pkg, ours) {
					t.Errorf("%s: %s may not import %s", f.name, pkg, ours)
				}
			case !f.test:
				checkFence(t, f.name, pkg, imp)
			}
		}
	}
}

func checkFence(t *testing.T, file, pkg, imp string) {
	t.Helper()
	for fence, inside := range fenced {
		if under(imp, fence) && !slices.ContainsFunc(inside, func(dir string) bool { return under(pkg, dir) }) {
			t.Errorf("%s: %s may not import %s; only %s may", file, pkg, imp, strings.Join(inside, ", "))
		}
	}
}

// TestTheTableBites checks arrows that must never be allowed.
func TestTheTableBites(t *testing.T) {
	for _, c := range []struct {
		pkg, imported string
		want          bool
	}{
		{"internal/control", "internal/sandbox", true},
		{"internal/control", "internal/node", false},
		{"internal/control", "internal/store/sqlite", false},
		{"internal/sandbox", "internal/sys", false},
		{"internal/httpapi", "internal/store/sqlite", false},
		{"internal/httpapi", "internal/node", false},
		{"internal/store/sqlite", "internal/store", true},
		{"internal/store/sqlite", "internal/control", false},
		{"internal/node", "internal/control", false},
		{"internal/node/driver/gvisor", "internal/engine", false},
		{"internal/server", "cmd/cloche", false},
		{"internal/server", "internal/control", true},
		{"client", "internal/server", false},
		{"client", "api", true},
		{"cmd/cloche", "internal/node", false},
		{"internal/elsewhere", "internal/sandbox", false},
	} {
		if got := mayImport(c.pkg, c.imported); got != c.want {
			t.Errorf("mayImport(%q, %q) = %v", c.pkg, c.imported, got)
		}
	}
}

// TestPackageComments wants at least two sentences on each package: what it is
// for, and what holds or who calls it. Generated files don't count.
func TestPackageComments(t *testing.T) {
	comments := map[string]string{}
	for _, f := range sources(t) {
		if !f.test && !f.generated {
			comments[path.Dir(f.name)] += docText(f.tree)
		}
	}
	dirs := make([]string, 0, len(comments))
	for dir := range comments {
		dirs = append(dirs, dir)
	}
	sort.Strings(dirs)
	for _, dir := range dirs {
		if n := sentences(comments[dir]); n < 2 {
			t.Errorf("%s: its package comment has %d sentences; say what it is for, what holds in it and who calls it", dir, n)
		}
	}
}

func docText(f *ast.File) string {
	if f.Doc == nil {
		return ""
	}
	return f.Doc.Text() + "\n"
}

// sentences counts full stops and colons that end a clause.
func sentences(text string) int {
	n := 0
	for _, word := range strings.Fields(text) {
		if strings.HasSuffix(word, ".") || strings.HasSuffix(word, ".)") {
			n++
		}
	}
	return n
}
