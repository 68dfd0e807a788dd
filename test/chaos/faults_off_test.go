//go:build !clochefaults

package chaos

// faults: only a build with the tag clochefaults can leave precautions out.
const faults = false
