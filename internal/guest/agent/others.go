package agent

import (
	"bytes"
	"os"
	"strconv"
)

// kernelThread is PF_KTHREAD in the flags of a stat file.
const kernelThread = 0x00200000

// countOthers counts the guest's processes that are not named, not PID 1, not
// the kernel's and not dead.
func countOthers(known map[int]bool) uint64 {
	dir, err := os.Open("/proc")
	if err != nil {
		return 0
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1) // what could be read
	n := uint64(0)
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || pid == 1 || known[pid] {
			continue
		}
		if stat, err := os.ReadFile("/proc/" + name + "/stat"); err == nil && livesInUserSpace(stat) {
			n++
		}
	}
	return n
}

// livesInUserSpace reads the third and ninth field of a stat file. The second
// is the program's own name in brackets and may hold anything.
func livesInUserSpace(stat []byte) bool {
	rest := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(rest) < 7 || bytes.ContainsAny(rest[0], "ZX") {
		return false
	}
	flags, err := strconv.ParseUint(string(rest[6]), 10, 64)
	return err == nil && flags&kernelThread == 0
}
