package engine

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/google/subcommands"
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"
)

const usage = `usage: cloche-gvisor control RUN-DIR | version
(The daemon starts this program; there is no need to.)
`

// Main runs the role that args name and returns its exit code. It must be the
// first thing that a process does.
func Main(args []string) int {
	role := ""
	if len(args) > 1 {
		role = args[1]
	}
	switch {
	case role == "control" && len(args) == 3:
		return controlMain(args[2])
	case role == "start" && len(args) == 3:
		return startMain(args[2])
	case role == "create" && len(args) == 3:
		return createMain(args[2])
	case role == "version":
		fmt.Println(Version)
		return 0
	case strings.HasPrefix(role, "--"), role == "boot", role == "gofer", role == "umount":
		runGVisor()
		return 0 // not reached: gVisor exits by itself
	}
	_, _ = io.WriteString(os.Stderr, usage)
	return 2
}

// runGVisor runs one of the internal commands that gVisor starts itself with.
func runGVisor() {
	const group = "internal use only"
	cli.Run(nil, map[util.SubCommand]string{
		new(sentrycmd.Boot):   group,
		new(cmd.Gofer):        group,
		new(sentrycmd.Umount): group,
	}, []subcommands.Command{})
}
