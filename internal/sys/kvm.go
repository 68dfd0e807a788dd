package sys

import "time"

// KVMReport is what TryKVM found out about /dev/kvm.
type KVMReport struct {
	Exists  bool   `json:"exists"`
	Opens   bool   `json:"opens"`
	Runs    bool   `json:"runs"`              // every step of the probe program ran
	Step    string `json:"step"`              // the last thing that was tried
	Problem string `json:"problem,omitempty"` // what went wrong in that step
	// LoopTime is how long the vCPU took for LoopSteps instructions in ring 0
	// of long mode. A virtual CPU needs some tens of milliseconds, an
	// interpreter some seconds.
	LoopTime  time.Duration `json:"loop_time"`
	LoopSteps int           `json:"loop_steps"`
	// TrapTime is the mean time of one page-table switch and one exception
	// with its return, in ring 0.
	TrapTime time.Duration `json:"trap_time"`
}

// MIPS is the measured speed of ring 0 code in millions of instructions per
// second; 0 when the loop did not end.
func (r KVMReport) MIPS() float64 {
	if r.LoopTime <= 0 {
		return 0
	}
	return float64(r.LoopSteps) / r.LoopTime.Seconds() / 1e6
}
