//go:build clochefaults

package chaos

// faults: this build of the suite can leave precautions out.
const faults = true
