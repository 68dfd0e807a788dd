// Command guest is what the driver's tests run in machines: as "supervisor" it
// dials the host and runs what it is told, as anything else it is a hog.
package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

type request struct {
	Args []string `json:"args"`
	UID  uint32   `json:"uid"`
}

type answer struct {
	Out  string `json:"out"`
	Code int    `json:"code"` // -signal when one ended it
}

func main() {
	args := os.Args[1:]
	if len(args) == 0 {
		os.Exit(2)
	}
	switch args[0] {
	case "supervisor":
		supervise()
	case "version":
		fmt.Println("test guest")
	case "cat":
		data, err := os.ReadFile(args[1])
		check(err)
		os.Stdout.Write(data)
	case "write":
		check(os.WriteFile(args[1], []byte(args[2]), 0o644))
	case "statfs":
		var st syscall.Statfs_t
		check(syscall.Statfs(args[1], &st))
		fmt.Println(int64(st.Blocks) * st.Bsize)
	case "bind": // SOURCE TARGET
		check(syscall.Mount(args[1], args[2], "", syscall.MS_BIND, ""))
	case "env":
		fmt.Println(strings.Join(os.Environ(), "\n"))
	case "stat":
		st, err := os.Stat(args[1])
		check(err)
		fmt.Println(st.Mode())
	case "hostname":
		h, err := os.Hostname()
		check(err)
		fmt.Println(h)
	case "interfaces":
		ifs, err := net.Interfaces()
		check(err)
		for _, i := range ifs {
			fmt.Println(i.Name, i.Flags)
		}
	case "anon":
		hogAnon(number(args[1]))
	case "fill":
		fill(args[1], number(args[2]))
	case "memfd":
		hogMemfd(number(args[1]))
	case "fork":
		hogFork()
	case "files":
		hogFiles(args[1], number(args[2]))
	case "sleep":
		time.Sleep(time.Duration(number(args[1])) * time.Second)
	case "kill1":
		check(syscall.Kill(1, syscall.SIGKILL))
		time.Sleep(time.Minute)
	default:
		os.Exit(2)
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

func supervise() {
	signal.Ignore(syscall.SIGPIPE)
	fmt.Fprintln(os.Stderr, "supervisor begins")
	addr := strings.TrimPrefix(os.Getenv("CLOCHE_DIAL"), "unix:")
	for {
		conn, err := net.Dial("unix", addr)
		if err != nil {
			time.Sleep(20 * time.Millisecond)
			continue
		}
		serve(conn)
		conn.Close()
	}
}

func serve(conn net.Conn) {
	dec, enc := json.NewDecoder(conn), json.NewEncoder(conn)
	for {
		var req request
		if dec.Decode(&req) != nil {
			return
		}
		if len(req.Args) > 1 && req.Args[0] == "exit" {
			os.Exit(number(req.Args[1]))
		}
		if len(req.Args) > 1 && req.Args[0] == "panic" {
			panic(req.Args[1])
		}
		cmd := exec.Command("/.cloche/guest", req.Args...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: req.UID, Gid: req.UID}}
		out, err := cmd.CombinedOutput()
		a := answer{Out: string(out)}
		if cmd.ProcessState == nil {
			a.Out, a.Code = fmt.Sprint(err), 127
		} else if ws := cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signaled() {
			a.Code = -int(ws.Signal())
		} else {
			a.Code = ws.ExitStatus()
		}
		if enc.Encode(a) != nil {
			return
		}
	}
}

func hogAnon(mib int) {
	for range mib {
		b, err := syscall.Mmap(-1, 0, 1<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
		check(err)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
	}
	fmt.Println("survived")
}

func fill(path string, mib int) {
	f, err := os.Create(path)
	check(err)
	buf := make([]byte, 1<<20)
	for i := range buf {
		buf[i] = byte(i)
	}
	for i := range mib {
		if _, err := f.Write(buf); err != nil {
			fmt.Println("full after", i, "MiB:", err)
			f.Close()
			os.Remove(path)
			os.Exit(4)
		}
	}
	check(f.Close())
	check(os.Remove(path))
	fmt.Println("wrote all")
}

func hogMemfd(mib int) {
	name := []byte("hog\x00")
	fd, _, errno := syscall.Syscall(319, ptr(name), 0, 0) // memfd_create on amd64
	if errno != 0 {
		check(errno)
	}
	buf := make([]byte, 1<<20)
	for i := range mib {
		if _, err := syscall.Write(int(fd), buf); err != nil {
			fmt.Println("refused after", i, "MiB:", err)
			os.Exit(4)
		}
	}
	fmt.Println("survived")
}

func hogFork() {
	var pids []*os.Process
	for {
		p, err := os.StartProcess("/.cloche/guest", []string{"guest", "sleep", "600"}, &os.ProcAttr{})
		if err != nil {
			fmt.Println("refused after", len(pids), err)
			break
		}
		pids = append(pids, p)
	}
	for _, p := range pids {
		p.Kill()
		p.Wait()
	}
}

func hogFiles(dir string, n int) {
	check(os.MkdirAll(dir, 0o755))
	for i := range n {
		f, err := os.Create(fmt.Sprintf("%s/%d", dir, i))
		if err != nil {
			fmt.Println("refused after", i, err)
			os.Exit(4)
		}
		f.Close()
	}
	fmt.Println("survived")
}
