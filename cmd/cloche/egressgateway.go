package main

import (
	"os"

	"github.com/spf13/cobra"

	"cloche.dev/cloche/internal/egress"
)

// egressGateway is the command by which the daemon starts the process through
// which everything leaves the sandboxes.
const egressGateway = "egress-gateway"

func newEgressGateway(a *app) *cobra.Command {
	var o egress.Options
	cmd := &cobra.Command{
		Use: egressGateway, Hidden: true, Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Listener, o.Log = os.NewFile(egress.ListenerFD, "the daemon's socket"), a.err
			return egress.Run(cmd.Context(), o)
		},
	}
	cmd.Flags().StringVar(&o.Root, "root", "/nonexistent", "an empty `DIRECTORY`: all that the process sees of the file system")
	cmd.Flags().StringVar(&o.Build, "build", version, "what the daemon that starts it calls this build")
	return cmd
}
