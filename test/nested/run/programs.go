package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"cloche.dev/cloche/test/nested"
)

// programs gets the real Firecracker and a kernel for tests that need no L1, and
// prints where they are as the environment that those tests look at. What can't
// be had is left out, and the tests then say so.
func programs(ctx context.Context, w io.Writer, cache string) error {
	cache, err := filepath.Abs(cache)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return err
	}
	if err := lock(cache); err != nil {
		return err
	}
	firecracker, err := nested.Firecracker(ctx, cache)
	if err != nil {
		return missed(err)
	}
	debs, err := nested.KernelPackages(ctx, cache)
	if err != nil {
		return missed(err)
	}
	k, err := nested.UnpackKernel(ctx, debs, filepath.Join(cache, "kernel"))
	if err != nil {
		return err
	}
	dir := filepath.Join(cache, "programs")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, from := range map[string]string{
		"firecracker": filepath.Join(firecracker, "firecracker"), "jailer": filepath.Join(firecracker, "jailer"), "vmlinux": k.Vmlinux,
	} {
		to := filepath.Join(dir, name)
		if err := os.Remove(to); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if err := os.Link(from, to); err != nil {
			return err
		}
	}
	fmt.Fprintf(w, "CLOCHE_FIRECRACKER=%s\n", dir)
	if len(debs) == 1 { // else it is a distribution that ships modules apart
		fmt.Fprintf(w, "CLOCHE_KERNEL_PACKAGE=%s\n", debs[0])
	}
	return nil
}

// missed says what is missing; that is no failure.
func missed(err error) error {
	var missing *nested.Missing
	if !errors.As(err, &missing) {
		return err
	}
	fmt.Fprintln(os.Stderr, "nested:", missing)
	return nil
}
