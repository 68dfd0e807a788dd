// Package weak makes a gateway that checks too little, so that the red-team
// suite can show that it would notice. Only a build with the tag "clocheweak"
// can be weakened, through an environment variable of the daemon, which it hands
// to the gateway that it starts; in every other build Is is false, Env is empty
// and the compiler drops what they guard. Never ship a build with the tag.
//
// internal/egress/proxy asks it what to leave out; internal/node/egress and
// internal/egress pass the variable on.
package weak

// EnvWeak names the weakness of a build with the tag.
const EnvWeak = "CLOCHE_WEAK"

// The weaknesses that Is knows.
const (
	Address = "address" // rules decide by the address that was dialled: nothing is looked into
	First   = "first"   // only the first request of a connection is decided
)
