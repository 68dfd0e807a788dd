package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func size() string {
	ws, err := unix.IoctlGetWinsize(0, unix.TIOCGWINSZ)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprint(ws.Row, "x", ws.Col)
}

func memory([]string) {
	var info syscall.Sysinfo_t
	check(syscall.Sysinfo(&info))
	fmt.Print(info.Totalram * uint64(info.Unit))
}

func take(mib int) {
	for range mib {
		b, err := syscall.Mmap(-1, 0, 1<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
		check(err)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
	}
}

func anon(a []string) {
	take(number(a[0]))
	fmt.Println("survived")
}

func hold(a []string) {
	take(number(a[0]))
	fmt.Println("ready")
	time.Sleep(10 * time.Minute) // longer than any clause, on a slow host too
}

// fill writes a file until it has the size or there is no room, and says which.
func fill(a []string) {
	f, err := os.Create(a[0])
	check(err)
	buf := make([]byte, 1<<20)
	for i := range buf {
		buf[i] = byte(rand.Uint32())
	}
	n := 0
	for n < number(a[1]) {
		if _, err = f.Write(buf); err != nil {
			break
		}
		n++
	}
	if err == nil {
		err = f.Sync()
	}
	if unwrapped, ok := err.(*os.PathError); ok && unwrapped.Err == syscall.ENOSPC {
		fmt.Print("full ", n)
		return
	}
	check(err)
	fmt.Print("wrote ", n)
}

// forks makes children that only wait, until it has many or is refused.
func forks(a []string) {
	var kids []int
	var refused error
	for len(kids) < number(a[0]) {
		pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
		if errno != 0 {
			refused = errno
			break
		}
		if pid == 0 {
			for {
				syscall.RawSyscall6(syscall.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
			}
		}
		kids = append(kids, int(pid))
	}
	for _, pid := range kids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
		_, _ = syscall.Wait4(pid, nil, 0, nil)
	}
	if refused == syscall.EAGAIN {
		fmt.Print("refused ", len(kids))
		return
	}
	check(refused)
	fmt.Print("made ", len(kids))
}

// spin keeps two cores busy for some milliseconds.
func spin(a []string) {
	fmt.Println("ready")
	until := time.Now().Add(time.Duration(number(a[0])) * time.Millisecond)
	done := make(chan int)
	for range 2 {
		go func() {
			n := 0
			for time.Now().Before(until) {
				n++
			}
			done <- n
		}()
	}
	<-done
	<-done
}

func initEnv() []string {
	b, err := os.ReadFile("/proc/1/environ")
	check(err)
	return strings.Split(strings.Trim(string(b), "\x00"), "\x00")
}

// dialHost dials the host as the agent does, and waits for its challenge.
func dialHost() (*os.File, error) {
	address := ""
	for _, kv := range initEnv() {
		if v, ok := strings.CutPrefix(kv, "CLOCHE_DIAL="); ok {
			address = v
		}
	}
	family, to := unix.AF_UNIX, unix.Sockaddr(&unix.SockaddrUnix{Name: strings.TrimPrefix(address, "unix:")})
	if rest, ok := strings.CutPrefix(address, "vsock:"); ok {
		var vm unix.SockaddrVM
		if _, err := fmt.Sscanf(rest, "%d:%d", &vm.CID, &vm.Port); err != nil {
			return nil, err
		}
		family, to = unix.AF_VSOCK, &vm
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Connect(fd, to); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "host"), nil
}

// impostor says the agent's hello without its proof, and with a made up one.
func impostor([]string) {
	bare := []byte("\x08\x01\x10\x01\x2a\x07control")
	for _, hello := range [][]byte{bare, append(append(bytes.Clone(bare), 0x3a, 32), make([]byte, 32)...)} {
		conn, err := dialHost()
		check(err)
		_, err = io.ReadFull(conn, make([]byte, 36))
		check(err)
		_, err = conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(hello))), hello...))
		check(err)
		n, err := conn.Read(make([]byte, 100))
		fmt.Println("answer", n, err != nil)
		_ = conn.Close()
	}
}

// flood dials the host as often as it can for some seconds, says nonsense on
// each connection and keeps some of them.
func flood(a []string) {
	fmt.Println("ready")
	until := time.Now().Add(time.Duration(number(a[0])) * time.Second)
	junk := make([]byte, 64<<10)
	for i := range junk {
		junk[i] = byte(rand.Uint32())
	}
	var kept []*os.File
	n := 0
	for ; time.Now().Before(until); n++ {
		conn, err := dialHost()
		if err != nil {
			time.Sleep(time.Millisecond)
			continue
		}
		_ = unix.SetNonblock(int(conn.Fd()), true)
		_, _ = unix.Write(int(conn.Fd()), junk)
		if kept = append(kept, conn); len(kept) > 50 {
			_ = kept[0].Close()
			kept = kept[1:]
		}
	}
	fmt.Println("flooded", n > 10)
}

// reboot asks the kernel to end the machine, in every way there is. On a host it
// would.
func reboot([]string) {
	if args, err := os.ReadFile("/proc/1/cmdline"); err != nil || !strings.HasSuffix(string(args), "supervisor\x00") {
		fmt.Println("this is no machine")
		os.Exit(3)
	}
	for _, how := range []int{
		syscall.LINUX_REBOOT_CMD_RESTART, syscall.LINUX_REBOOT_CMD_POWER_OFF, syscall.LINUX_REBOOT_CMD_HALT, syscall.LINUX_REBOOT_CMD_KEXEC,
	} {
		switch err := syscall.Reboot(how); err {
		case nil:
			fmt.Println("allowed")
		case syscall.EPERM, syscall.ENOSYS:
			fmt.Println("refused")
		default: // it looked at what was asked, and would have done it
			fmt.Println(err)
		}
	}
}
