package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"cloche.dev/cloche/internal/sys"
)

// leastMIPS is the speed of ring 0 code below which a guest kernel does not
// boot in useful time. A virtual CPU does some thousands, one inside an
// emulated machine some hundreds, a KVM that interprets less than 3.
const leastMIPS = 10

const needless = "not needed: without it sandboxes run under gVisor instead of Firecracker"

// checkKVM runs the probe program in a child, since KVM may never give its
// thread back: a process can be killed.
func checkKVM(ctx context.Context, o Options) Check {
	ctx, cancel := context.WithTimeout(ctx, kvmTime)
	defer cancel()
	var out, steps bytes.Buffer
	cmd := exec.CommandContext(ctx, o.KVM[0], o.KVM[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &steps
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	if ctx.Err() != nil {
		lines := strings.Split(strings.TrimSpace(steps.String()), "\n")
		return Check{
			Status: Warn, Detail: fmt.Sprintf("opens, but did not come back within %v from: %s", kvmTime, lines[len(lines)-1]),
			Mend: needless,
		}
	}
	var r sys.KVMReport
	if err != nil || json.Unmarshal(out.Bytes(), &r) != nil {
		return Check{Status: Warn, Detail: fmt.Sprintf("the trial ended without a report (%v)", err), Mend: needless}
	}
	return judgeKVM(r)
}

// judgeKVM says no more than was proven.
func judgeKVM(r sys.KVMReport) Check {
	switch {
	case !r.Exists:
		return Check{Status: Warn, Detail: "there is no /dev/kvm", Mend: needless + "; for it, load kvm_intel or kvm_amd, or ask the host for nested virtualisation"}
	case !r.Opens:
		return Check{Status: Warn, Detail: "/dev/kvm can't be opened: " + r.Problem, Mend: needless + "; for it, run as root or join the group kvm"}
	case !r.Runs:
		return Check{Status: Warn, Detail: fmt.Sprintf("opens, but can't %s: %s", r.Step, r.Problem), Mend: needless}
	case r.MIPS() < leastMIPS:
		return Check{
			Status: Warn,
			Detail: fmt.Sprintf("opens and passes every step, but interprets kernel code: %.1f million instructions a second in ring 0, where a virtual CPU does thousands. Linux can't boot on it", r.MIPS()),
			Mend:   needless + "; a machine with real or nested virtualisation has a KVM that boots",
		}
	}
	return Check{Status: OK, Detail: fmt.Sprintf("runs kernel code (ring 0 at %.0f million instructions a second, %v for a page-table switch and an exception); only a boot proves that Linux boots", r.MIPS(), r.TrapTime)}
}

// checkFirecracker tells what is installed of it and whether that boots. Where it
// doesn't, gVisor is there.
func checkFirecracker(ctx context.Context, o Options) Check {
	if o.Firecracker == nil {
		return Check{Status: Warn, Detail: "not looked at: only root can boot a machine", Mend: "run `sudo cloche doctor`"}
	}
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	c := o.Firecracker(ctx, !o.noKVM)
	if c.OK {
		return Check{Status: OK, Detail: c.Reason}
	}
	mend := c.Hint
	if mend == "" {
		mend = "mend what the line above says"
	}
	return Check{Status: Warn, Detail: c.Reason, Mend: mend + "; sandboxes run under gVisor meanwhile"}
}

// RunKVM is the child of checkKVM: it tries KVM and prints the steps and the
// report where checkKVM looks for them.
func RunKVM(out, steps *os.File) error {
	if runtime.GOOS != "linux" {
		return json.NewEncoder(out).Encode(sys.KVMReport{Problem: "this is not Linux"})
	}
	return json.NewEncoder(out).Encode(sys.TryKVM(func(s string) { _, _ = fmt.Fprintln(steps, s) }))
}
