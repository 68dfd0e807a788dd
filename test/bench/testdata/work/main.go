// Command work is what the benchmarks run in a sandbox: it ends at once,
// sleeps, writes a known pattern, or reads a tree. It is static and small, so
// that what is measured is the way to it and not itself.
package main

import (
	"crypto/rand"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"cloche.dev/cloche/test/bench/pattern"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return nil
	}
	started := time.Now()
	switch args[0] {
	case "sleep":
		time.Sleep(time.Hour)
	case "hold": // MIB of memory that can't be compressed or shared
		if err := hold(args[1]); err != nil {
			return err
		}
	case "spew":
		n, err := strconv.ParseInt(args[1], 10, 64)
		if err == nil {
			err = spew(n)
		}
		if err != nil {
			return err
		}
	case "read":
		n, size, err := read(args[1])
		if err != nil {
			return err
		}
		fmt.Fprintf(os.Stdout, "%d %d\n", n, size)
	}
	// What it took as seen from inside, on a stream of its own.
	fmt.Fprintln(os.Stderr, time.Since(started).Nanoseconds())
	return nil
}

func hold(mib string) error {
	n, err := strconv.Atoi(mib)
	if err != nil {
		return err
	}
	held := make([]byte, n<<20)
	if _, err := rand.Read(held); err != nil {
		return err
	}
	time.Sleep(time.Hour)
	runtime.KeepAlive(held)
	return nil
}

func spew(n int64) error {
	var b [pattern.Block]byte
	for at := int64(0); at < n; at += pattern.Block {
		pattern.Fill(b[:], at)
		if _, err := os.Stdout.Write(b[:min(pattern.Block, n-at)]); err != nil {
			return err
		}
	}
	return nil
}

// read reads every file below root and counts files and bytes.
func read(root string) (files int, size int64, err error) {
	err = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		files++
		size += int64(len(data))
		return err
	})
	return files, size, err
}
