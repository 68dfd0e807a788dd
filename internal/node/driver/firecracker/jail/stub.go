package jail

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"runtime"
)

// vmmName is the VMM's program in the jail: a hard link, so that all jails have
// one file and share its pages.
const vmmName = "vmm"

// The jailer copies the program that it is to start into each jail, megabytes of
// it. So what it is given is a stub of some hundred bytes that executes the
// program which lies there already, after the jailer has given up everything that
// it gives up. It is made here, of the machine code of
//
//	execve("/vmm", argv, envp); exit(127)
//
// where there is such code for this host's processor.

// program puts the VMM into the jail, and returns what the jailer is to start.
func (j *Jail) program(ctx context.Context, firecracker string) (string, error) {
	if runtime.GOARCH != "amd64" {
		return firecracker, nil
	}
	if err := j.Share(ctx, firecracker, vmmName); err != nil {
		return "", err
	}
	path := filepath.Join(j.dir, binaryName)
	if err := writeProgram(path, stub("/"+vmmName)); err != nil {
		return "", diskError(err)
	}
	return path, nil
}

// writeProgram makes a file that anybody may execute, whatever our umask: the
// jailer copies its mode too, and executes the copy as the jail's user.
func writeProgram(path string, code []byte) error {
	return errors.Join(os.WriteFile(path, code, 0o500), os.Chmod(path, 0o555))
}

// stub is an executable for x86-64 Linux that executes path in its own place.
func stub(path string) []byte {
	code := []byte{
		0x48, 0x8b, 0x04, 0x24, // mov rax, [rsp]: argc
		0x48, 0x8d, 0x74, 0x24, 0x08, // lea rsi, [rsp+8]: argv
		0x48, 0x8d, 0x54, 0xc4, 0x10, // lea rdx, [rsp+rax*8+16]: envp
		0x48, 0x8d, 0x3d, 21, 0, 0, 0, // lea rdi, [rip+21]: the path, behind the code
		0xb8, 59, 0, 0, 0, // mov eax, 59
		0x0f, 0x05, // syscall: execve
		0xbf, 127, 0, 0, 0, // mov edi, 127
		0xb8, 60, 0, 0, 0, // mov eax, 60
		0x0f, 0x05, // syscall: exit
		0x0f, 0x0b, // ud2
	}
	code = append(append(code, path...), 0)
	const base, headers = 0x400000, 64 + 56
	var b bytes.Buffer
	for _, part := range []any{
		// The header of an ELF file: 64 bits, little endian, System V; executable, x86-64.
		[16]byte{0x7f, 'E', 'L', 'F', 2, 1, 1},
		uint16(2), uint16(62), uint32(1),
		uint64(base + headers), uint64(64), uint64(0), uint32(0), uint16(64), uint16(56), uint16(1), uint16(0), uint16(0), uint16(0),
		// One segment, all of the file, to read and execute.
		uint32(1), uint32(5), uint64(0), uint64(base), uint64(base), uint64(headers + len(code)), uint64(headers + len(code)), uint64(0x1000),
		code,
	} {
		_ = binary.Write(&b, binary.LittleEndian, part) // a buffer takes it all
	}
	return b.Bytes()
}
