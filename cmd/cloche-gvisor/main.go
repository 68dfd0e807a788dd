// Command cloche-gvisor is Cloche's gVisor engine: the pinned gVisor and the
// control process around it. It is embedded into cloche, which unpacks and
// starts it.
package main

import (
	"os"

	"cloche.dev/cloche/internal/engine"
)

func main() { os.Exit(engine.Main(os.Args)) }
