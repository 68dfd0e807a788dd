// Package fault names ways in which a guest can be deliberately broken, so
// that a conformance suite can prove that it notices. Only a build with the
// tag "clochefaults" can be broken, by naming one fault in the environment
// variable Env of PID 1; in every other build Is is constantly false.
//
// internal/guest/boot, internal/guest/supervisor and internal/guest/agent call it.
package fault

// Env is the environment variable that names the fault.
const Env = "CLOCHE_FAULT"

// The faults.
const (
	ExitLost       = "exit_lost"        // every exit code is told as 0
	Swapped        = "swapped"          // stdout is told as stderr and the other way round
	WrongUser      = "wrong_user"       // processes run as root, whoever was asked for
	OutputLost     = "output_lost"      // the first byte of every read is dropped
	SignalMainOnly = "signal_main_only" // a signal reaches the main process, not its group
	NoReap         = "no_reap"          // orphans are not reaped
	LimitIgnored   = "limit_ignored"    // RLIMIT_NPROC is not set
	EnvLost        = "env_lost"         // the environment of Start is dropped
	CwdIgnored     = "cwd_ignored"      // every process starts in /
	TimeoutIgnored = "timeout_ignored"  // timeouts never fire
	StdinDropped   = "stdin_dropped"    // stdin is accepted and thrown away
	OrphanWait     = "orphan_wait"      // the exit waits until orphans close stdout
	HelloUnproven  = "hello_unproven"   // the agent never sends its proof
	NoReseed       = "no_reseed"        // the kernel's generator goes on as it stood in the snapshot
	NoFreeze       = "no_freeze"        // Freeze is answered and nothing is held still
	AgentOnce      = "agent_once"       // an ended agent is not started again
	SupervisorEnds = "supervisor_ends"  // PID 1 ends half a second after its start
	RebootAllowed  = "reboot_allowed"   // root inside may restart the machine
	SyncIgnored    = "sync_ignored"     // Sync is answered and nothing is synced
)
