// Command inside is the only program in the conformance suite's image: it
// looks at a machine from within and misbehaves on request. The suite runs it
// on the host too, where both sides must say the same. As "supervisor" it
// stands in for a guest whose PID 1 ends by itself.
package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"time"
)

var commands = map[string]func(args []string){
	"supervisor": func([]string) { time.Sleep(500 * time.Millisecond); os.Exit(7) },
	"cat":        func(a []string) { b, err := os.ReadFile(a[0]); check(err); out(b) },
	"write":      write,
	"scribble":   func(a []string) { check(os.WriteFile(a[0], []byte(a[1]), 0o644)) },
	"rm":         func(a []string) { check(os.Remove(a[0])); syncDir(a[0]) },
	"exit":       func(a []string) { os.Exit(number(a[0])) },
	"die": func(a []string) {
		check(syscall.Kill(os.Getpid(), syscall.Signal(number(a[0]))))
		time.Sleep(time.Minute)
	},
	"sleep":    func(a []string) { fmt.Println("ready"); time.Sleep(time.Duration(number(a[0])) * time.Second) },
	"both":     func([]string) { fmt.Fprint(os.Stdout, "to stdout"); fmt.Fprint(os.Stderr, "to stderr") },
	"env":      func([]string) { fmt.Println(strings.Join(os.Environ(), "\n")) },
	"cwd":      func([]string) { d, err := os.Getwd(); check(err); fmt.Print(d) },
	"hostname": func([]string) { h, err := os.Hostname(); check(err); fmt.Print(h) },
	"ids":      ids,
	"hash": func([]string) {
		h := sha256.New()
		n, err := io.Copy(h, os.Stdin)
		check(err)
		fmt.Printf("%d %x", n, h.Sum(nil))
	},
	"out":     func(a []string) { noise(number(a[0])) },
	"tree":    func(a []string) { tree(a[0]) },
	"tty":     tty,
	"ticks":   ticks,
	"family":  family,
	"alive":   func(a []string) { fmt.Print(syscall.Kill(number(a[0]), 0) == nil) },
	"orphan":  orphan,
	"detach":  detach,
	"zombies": zombies,
	"init": func([]string) {
		b, err := os.ReadFile("/proc/1/cmdline")
		check(err)
		out(bytes.ReplaceAll(b, []byte{0}, []byte{' '}))
	},
	"initenv":    func([]string) { fmt.Println(strings.Join(initEnv(), "\n")) },
	"killagent":  killAgent,
	"interfaces": interfaces,
	"dial":       dial,
	"udp":        udp,
	"ask":        func(a []string) { converse("udp", a[0]) },
	"say":        func(a []string) { converse("tcp", a[0]) },
	"frame":      frame,
	"echo":       echo,
	"anon":       anon,
	"hold":       hold,
	"fill":       fill,
	"forks":      forks,
	"spin":       spin,
	"impostor":   impostor,
	"flood":      flood,
	"memory":     memory,
	"reboot":     reboot,
	"randoms":    randoms,
	"reseed":     reseed,
}

func main() {
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "inside: no such command:", os.Args)
		os.Exit(2)
	}
	commands[os.Args[1]](os.Args[2:])
}

// write writes a file so that it is on the disk, as whoever counts on a disk
// image does.
func write(a []string) {
	f, err := os.OpenFile(a[0], os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	check(err)
	_, err = f.WriteString(a[1])
	check(err)
	check(f.Sync())
	check(f.Close())
	syncDir(a[0])
}

// syncDir makes the names beside a file durable. Not every filesystem can.
func syncDir(file string) {
	if d, err := os.Open(filepath.Dir(file)); err == nil {
		_ = d.Sync()
		_ = d.Close()
	}
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	check(err)
	return n
}

func check(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(3)
	}
}

func out(b []byte) {
	_, err := os.Stdout.Write(b)
	check(err)
}

func ids([]string) {
	groups, err := os.Getgroups()
	check(err)
	sort.Ints(groups)
	fmt.Print(os.Getuid(), os.Geteuid(), os.Getgid(), os.Getegid(), groups)
}

// noise writes n bytes that look random and are always the same.
func noise(n int) {
	buf := make([]byte, 64<<10)
	x := uint64(88172645463325252)
	for n > 0 {
		for i := 0; i < len(buf); i += 8 {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
			binary.LittleEndian.PutUint64(buf[i:], x)
		}
		k := min(n, len(buf))
		out(buf[:k])
		n -= k
	}
}

// tree prints a line for everything below a directory.
func tree(dir string) {
	check(filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := os.Lstat(path)
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		raw := st.Sys().(*syscall.Stat_t)
		line := fmt.Sprintf("%q %v %d:%d", rel, st.Mode(), raw.Uid, raw.Gid)
		switch {
		case st.Mode().IsRegular():
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %d %x %d", st.Size(), sha256.Sum256(data), st.ModTime().Unix())
		case st.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += " " + to
		}
		fmt.Println(line)
		return nil
	}))
}

func tty([]string) {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGWINCH)
	fmt.Println("size", size())
	<-c
	fmt.Println("now", size())
}

func ticks(a []string) {
	for i := range number(a[0]) {
		fmt.Println("tick", i)
		time.Sleep(time.Duration(number(a[1])) * time.Millisecond)
	}
}

func spawn(attr *os.ProcAttr, args ...string) *os.Process {
	if attr.Files == nil {
		attr.Files = []*os.File{os.Stdin, os.Stdout, os.Stderr}
	}
	p, err := os.StartProcess(self(), append([]string{"inside"}, args...), attr)
	check(err)
	return p
}

func self() string {
	exe, err := os.Executable()
	check(err)
	return exe
}

// family is a process with a child in the same group.
func family([]string) {
	p := spawn(&os.ProcAttr{}, "sleep", "60")
	fmt.Println("child", p.Pid)
	time.Sleep(time.Minute)
}

// detach ends while a child of it keeps its stdout open.
func detach([]string) {
	spawn(&os.ProcAttr{Sys: &syscall.SysProcAttr{Setsid: true}}, "sleep", "8")
}

// orphan leaves children behind that end after it.
func orphan(a []string) {
	for range number(a[0]) {
		spawn(&os.ProcAttr{Files: []*os.File{nil, nil, nil}}, "ticks", "1", "300")
	}
}

func eachProcess(visit func(pid int, stat []byte)) {
	names, err := filepath.Glob("/proc/[0-9]*/stat")
	check(err)
	for _, name := range names {
		if stat, err := os.ReadFile(name); err == nil {
			visit(number(strings.Split(name, "/")[2]), stat)
		}
	}
}

func zombies([]string) {
	n := 0
	eachProcess(func(_ int, stat []byte) {
		if rest := stat[bytes.LastIndexByte(stat, ')')+1:]; bytes.HasPrefix(rest, []byte(" Z")) {
			n++
		}
	})
	fmt.Print(n)
}

func killAgent([]string) {
	n := 0
	eachProcess(func(pid int, _ []byte) {
		args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if bytes.HasSuffix(args, []byte("guest\x00agent\x00")) {
			check(syscall.Kill(pid, syscall.SIGKILL))
			n++
		}
	})
	fmt.Print("killed ", n)
}

func interfaces([]string) {
	list, err := net.Interfaces()
	check(err)
	for _, i := range list {
		addrs, err := i.Addrs()
		check(err)
		said := fmt.Sprint(i.Name, " ", i.Flags&net.FlagLoopback != 0, " ", i.Flags&net.FlagUp != 0, " ", i.MTU, " ", i.HardwareAddr)
		for _, a := range addrs {
			said += " " + a.String()
		}
		fmt.Println(said)
	}
}

// dial tries addresses and prints those that answered.
func dial(addresses []string) {
	for _, a := range addresses {
		conn, err := net.DialTimeout("tcp", a, time.Second)
		if err == nil {
			fmt.Println("reached", a)
			_ = conn.Close()
		}
	}
	fmt.Println("done")
}

// udp sends a datagram to each address.
func udp(addresses []string) {
	for _, a := range addresses {
		if conn, err := net.Dial("udp", a); err == nil {
			_, _ = conn.Write([]byte("out"))
			_ = conn.Close()
		}
	}
	fmt.Println("done")
}

// converse says hello to an address and prints the answer.
func converse(network, address string) {
	conn, err := net.DialTimeout(network, address, 20*time.Second)
	check(err)
	check(conn.SetDeadline(time.Now().Add(20 * time.Second)))
	_, err = conn.Write([]byte("hello"))
	check(err)
	answer := make([]byte, 100)
	n, err := conn.Read(answer)
	check(err)
	fmt.Print(string(answer[:n]))
}

// echo serves one connection on an address.
func echo(a []string) {
	l, err := net.Listen("tcp", a[0])
	check(err)
	fmt.Println("ready")
	conn, err := l.Accept()
	check(err)
	_, err = io.Copy(conn, conn)
	check(err)
	check(conn.(*net.TCPConn).CloseWrite())
}
