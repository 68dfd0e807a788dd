package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// randoms reads the kernel's generator for ever. Each line is what it read after
// the machine's generation that it has.
func randoms(a []string) {
	for {
		generation, _ := os.ReadFile("/run/cloche/generation") // not there before the first setup that has one
		b := make([]byte, 32)
		n, err := unix.Getrandom(b, 0)
		check(err)
		fmt.Printf("%s %x\n", strings.TrimSpace("g"+string(generation)), b[:n])
		time.Sleep(time.Duration(number(a[0])) * time.Millisecond)
	}
}

// reseed has the kernel's generator draw a new key now, so that the next time
// that it does so by itself is as far away as can be. One that is the host's
// knows no such call.
func reseed([]string) {
	fd, err := unix.Open("/dev/urandom", unix.O_RDWR, 0)
	check(err)
	_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.RNDRESEEDCRNG, 0)
	if e != 0 && e != unix.ENOTTY && e != unix.EINVAL && e != unix.EPERM {
		check(e)
	}
	fmt.Print("done")
}
