// Command cloche-guest is what Cloche puts into every sandbox: the supervisor
// that is PID 1, and the agent that the supervisor runs. It is embedded into
// cloche, static, and started by drivers. In a virtual machine it is /init too,
// which makes the machine ready for the supervisor.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime"
	"runtime/debug"

	"cloche.dev/cloche/internal/guest/agent"
	"cloche.dev/cloche/internal/guest/boot"
	"cloche.dev/cloche/internal/guest/fault"
	"cloche.dev/cloche/internal/guest/supervisor"
)

// dialEnv tells how to reach the host: "unix:PATH" or "vsock:CID:PORT".
const dialEnv = "CLOCHE_DIAL"

// agentSocket is the descriptor of the agent's link to the supervisor.
const agentSocket = 3

// build is set by the linker.
var build = "devel"

func main() {
	role := ""
	switch {
	case len(os.Args) == 2:
		role = os.Args[1]
	case len(os.Args) == 1 && os.Getpid() == 1:
		role = "boot"
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})).With("role", role)
	if err := run(role, log); err != nil {
		log.Error("ended", "error", err)
		os.Exit(1)
	}
}

func run(role string, log *slog.Logger) error {
	// Many of these run on one host, mostly idle: memory matters more than cores,
	// and each hand-over between threads costs two switches into the sentry.
	debug.SetGCPercent(50)
	runtime.GOMAXPROCS(1)
	switch role {
	case "boot":
		return boot.Run()
	case "version":
		fmt.Println("cloche-guest", build)
		return nil
	case "supervisor":
		exe, err := os.Executable()
		if err != nil {
			return err
		}
		env := []string{dialEnv + "=" + os.Getenv(dialEnv), "PATH=" + os.Getenv("PATH"), fault.Env + "=" + os.Getenv(fault.Env)}
		debug.SetMemoryLimit(48 << 20)
		return supervisor.Run(context.Background(), supervisor.Config{Agent: []string{exe, "agent"}, Env: env, Log: log})
	case "agent":
		debug.SetMemoryLimit(48 << 20)
		f := os.NewFile(agentSocket, "supervisor")
		conn, err := net.FileConn(f)
		_ = f.Close()
		if err != nil {
			return fmt.Errorf("the agent is started by the supervisor alone: %w", err)
		}
		return agent.Run(context.Background(), agent.Config{Supervisor: conn, Dial: os.Getenv(dialEnv), Build: build, Log: log})
	}
	return errors.New("usage: cloche-guest supervisor | agent | version")
}
