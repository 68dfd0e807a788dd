package kernel

import "io/fs"

// Modules returns the named modules of an unpacked package (boot/vmlinuz-V,
// lib/modules/V) and what they depend on, without those that its image has
// built in, in an order in which they can be loaded. It is for a host that boots
// the same kernel as its guests: test/nested.
func Modules(pkg fs.FS, names ...string) ([]Module, error) {
	t, err := findTree(pkg)
	if err != nil {
		return nil, err
	}
	for i, n := range names {
		names[i] = moduleName(n)
	}
	return t.resolve(names)
}
