package engine

import (
	"flag"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/specutils"

	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
)

const (
	// cpuPeriod is the kernel's own default, in microseconds.
	cpuPeriod = 100_000

	// These are oom_score_adj values. When a machine is out of memory, the
	// kernel must take the guest's processes (each has a stub process on the
	// host) and not the sentry, which is the machine: with 1000 a stub is
	// taken before any process with 0, however large. The stub of the guest's
	// PID 1 ends the machine too, so it comes after the other stubs.
	stubScore = 1000
	initScore = 500
	// sentryScore also covers what is charged to no process. It needs
	// CAP_SYS_RESOURCE and is left out where we don't have that. -1000 would
	// be worse: once no stub is left nothing could be killed, and a page fault
	// that can't be served is retried forever.
	sentryScore = -999
)

// runscConfig returns gVisor's configuration for one machine. Every flag that
// a snapshot freezes is named, whatever gVisor's default is.
func runscConfig(root string, req *enginerpc.CreateRequest) (*config.Config, error) {
	fs := flag.NewFlagSet("engine", flag.ContinueOnError)
	config.RegisterFlags(fs)
	set := map[string]string{
		"root":     root,
		"platform": "systrap",
		// The sentry is an unprivileged user without access to host files.
		"directfs":                 "false",
		"network":                  "sandbox",
		"host-uds":                 "open",
		"allow-suid":               "true", // sudo
		"cpu-num-from-quota":       "true",
		"host-settings":            "ignore",
		"sidecar-usage-policy":     "LEGACY_DEPRECATED_SLOW_EMBEDDED_FALLBACK",
		"control-rpc-stop-timeout": "0",
		// A restored machine's spec is made from the request that its image
		// holds (thaw); what then differs is meant to: paths of this machine.
		"restore-spec-validation": "ignore",
		"traceback":               "single",
	}
	if req != nil {
		set["overlay2"] = "root:dir=" + filepath.Join(req.Dir, enginerpc.OverlayName)
		set["panic-log"] = filepath.Join(req.Dir, enginerpc.PanicName)
		// The gofer has no use for a network, so it shares the machine's own
		// namespace; a common one would be a mount that somebody must remove.
		set["gofer-network-namespace"] = req.NetNS
	}
	for name, value := range set {
		if err := fs.Set(name, value); err != nil {
			return nil, fmt.Errorf("gVisor's flag %s: %w", name, err)
		}
	}
	return config.NewFromFlags(fs)
}

// ociSpec returns the OCI runtime spec of a machine, as it is stored and as a
// later restore will use it.
func ociSpec(req *enginerpc.CreateRequest) *specs.Spec {
	return &specs.Spec{
		Version:  specs.Version,
		Hostname: req.Hostname,
		Root:     &specs.Root{Path: filepath.Join(req.Dir, enginerpc.BundleName, "rootfs")},
		Process: &specs.Process{
			Args: req.Args, Env: req.Env, Cwd: "/",
			Capabilities: allCapabilities(),
			Rlimits: []specs.POSIXRlimit{
				{Type: "RLIMIT_NOFILE", Soft: 1 << 16, Hard: 1 << 20},
				{Type: "RLIMIT_NPROC", Soft: uint64(req.MaxProcs), Hard: uint64(req.MaxProcs)},
				{Type: "RLIMIT_CORE"},
			},
		},
		Mounts: mounts(req),
		Linux: &specs.Linux{
			CgroupsPath: req.Cgroup,
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace},
				{Type: specs.IPCNamespace},
				{Type: specs.UTSNamespace},
				{Type: specs.MountNamespace},
				{Type: specs.NetworkNamespace, Path: req.NetNS},
			},
			Resources: &specs.LinuxResources{
				// gVisor tells the guest that it has as much memory as the
				// cgroup allows when the sentry starts; the overhead is
				// added after that.
				Memory: &specs.LinuxMemory{Limit: &req.MemoryBytes},
				CPU:    &specs.LinuxCPU{Quota: new(int64(req.MilliCPU) * cpuPeriod / 1000), Period: new(uint64(cpuPeriod))},
				Pids:   &specs.LinuxPids{Limit: int64(req.MaxTasks)},
			},
		},
		Annotations: map[string]string{
			"dev.gvisor.spec.rootfs.source":  req.Image,
			"dev.gvisor.spec.rootfs.type":    "erofs",
			"dev.gvisor.spec.rootfs.overlay": "dir=" + filepath.Join(req.Dir, enginerpc.OverlayName),
			"dev.gvisor.spec.rootfs.options": "size=" + strconv.FormatInt(req.DiskBytes, 10),
		},
	}
}

func mounts(req *enginerpc.CreateRequest) []specs.Mount {
	m := []specs.Mount{
		{Type: "proc", Source: "proc", Destination: "/proc"},
		{Type: "sysfs", Source: "sysfs", Destination: "/sys"},
		{Type: "dev", Source: "dev", Destination: "/dev"},
		{Type: "devpts", Source: "devpts", Destination: "/dev/pts"},
		// gVisor lays a tmpfs of its own, without a limit, over /tmp where the
		// image has an empty one or none, unless the spec mounts something
		// there. A type that it doesn't know counts as such and is then
		// skipped, so that /tmp stays on the overlay with its quota.
		{Type: "overlay-has-it", Source: "none", Destination: "/tmp"},
	}
	for _, t := range req.Tmpfs {
		m = append(m, specs.Mount{
			Type: "tmpfs", Source: "tmpfs", Destination: t.Target,
			Options: []string{"nosuid", "mode=" + t.Mode, "size=" + strconv.FormatInt(t.Bytes, 10)},
		})
	}
	for _, b := range req.Binds {
		m = append(m, specs.Mount{
			Type: "bind", Source: b.Source, Destination: b.Target, Options: []string{"bind", "ro", "nosuid"},
		})
	}
	return m
}

// allCapabilities is what root in the guest has. They are the sentry's own
// notion and give no right over the host.
func allCapabilities() *specs.LinuxCapabilities {
	all := specutils.AllCapabilities().Permitted
	slices.Sort(all) // the stored spec shall not depend on a map's order
	return &specs.LinuxCapabilities{Bounding: all, Effective: all, Permitted: all}
}
