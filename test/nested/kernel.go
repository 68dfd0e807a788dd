package nested

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"cloche.dev/cloche/internal/node/driver/firecracker/kernel"
)

// Kernel is a distribution's kernel, made ready for both machines.
type Kernel struct {
	Name    string          // its release
	Image   string          // the bzImage that L1 boots
	L1      []kernel.Module // what L1 loads, in order
	Vmlinux string          // the guests' kernel
	Modules string          // the archive of the guests' modules
}

// l1Modules are what a host of machines has: KVM for the processor that QEMU
// shows, what machines' networks and images need.
var l1Modules = []string{
	"kvm_amd", "tun", "veth", "loop", "erofs", "overlay", "fuse",
	"nf_tables", "nf_conntrack", "nft_ct", "nft_connlimit", "nft_chain_nat", "nft_redir", "nft_reject_inet", "nft_objref",
}

// KernelPackages returns the packages with the newest kernel of this host's
// distribution, files below cache. One kernel serves L1 and L2. apt gets them,
// unless an earlier run did and its index says the same.
func KernelPackages(ctx context.Context, cache string) (debs []string, err error) {
	debs, err = kernelPackages(ctx, cache)
	if err != nil && ctx.Err() == nil {
		// An index that is missing or old is the common case on images.
		if command(ctx, "", "apt-get", "-q", "update") == nil {
			debs, err = kernelPackages(ctx, cache)
		}
	}
	if err != nil {
		return nil, &Missing{fmt.Sprintf("a kernel package (of %s)", kernel.Metapackages), err}
	}
	return debs, nil
}

func kernelPackages(ctx context.Context, cache string) ([]string, error) {
	// Its exit status tells only that one of the two is unknown.
	index, _ := exec.CommandContext(ctx, "apt-cache", append([]string{"show", "--no-all-versions"}, kernel.Metapackages...)...).Output()
	if len(index) == 0 {
		return nil, errors.New("apt's index does not have it")
	}
	sum := sha256.Sum256(index)
	dir := filepath.Join(cache, "packages-"+hex.EncodeToString(sum[:6]))
	if debs, err := filepath.Glob(filepath.Join(dir, "*.deb")); err != nil || len(debs) > 0 {
		return debs, err
	}
	tmp, err := os.MkdirTemp(cache, "packages-new-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	if _, err := kernel.Download(ctx, "", tmp, func(string) {}); err != nil {
		return nil, err
	}
	if err := errors.Join(os.RemoveAll(dir), os.Rename(tmp, dir)); err != nil {
		return nil, err
	}
	return filepath.Glob(filepath.Join(dir, "*.deb"))
}

// UnpackKernel makes a kernel's files in a new directory.
func UnpackKernel(ctx context.Context, debs []string, dir string) (*Kernel, error) {
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755)); err != nil {
		return nil, err
	}
	f, err := kernel.Build(ctx, debs, dir)
	if err != nil {
		return nil, err
	}
	tree := filepath.Join(dir, "tree") // where Build unpacks
	k := &Kernel{Name: f.Name, Image: filepath.Join(tree, "boot", "vmlinuz-"+f.Name), Vmlinux: f.Image, Modules: f.Modules}
	k.L1, err = kernel.Modules(os.DirFS(tree), l1Modules...)
	return k, err
}
