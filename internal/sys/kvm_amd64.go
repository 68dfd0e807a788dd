package sys

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The KVM ioctls that the probe needs.
const (
	kvmGetAPIVersion    = 0xAE00
	kvmCreateVM         = 0xAE01
	kvmGetVCPUMmapSize  = 0xAE04
	kvmGetSupportedCPU  = 0xC008AE05
	kvmCreateVCPU       = 0xAE41
	kvmSetUserMemory    = 0x4020AE46
	kvmSetTSSAddr       = 0xAE47
	kvmRun              = 0xAE80
	kvmSetRegs          = 0x4090AE82
	kvmGetSregs         = 0x8138AE83
	kvmSetSregs         = 0x4138AE84
	kvmSetCPUID         = 0x4008AE90
	kvmExitIO           = 2
	kvmCPUIDEntries     = 256
	kvmCPUIDEntrySize   = 40
	kvmGuestMemory      = 2 << 20
	kvmPortMark         = 0xf4 // the probe program writes its marks here
	kvmExitReasonOffset = 8
	kvmExitIOOffset     = 32
)

// Where things lie in the guest's memory.
const (
	probePML4  = 0x1000
	probePDPT  = 0x2000
	probePD    = 0x3000
	probeIDT   = 0x5000
	probeGDT   = 0x6000
	probeStack = 0x9000
	probeCode  = 0x10000
	probeTrap  = 0x11000
	probeData  = 0x100000
)

const (
	probeLoops = 1_000_000
	probeTraps = 1000
)

// TryKVM runs a small program in ring 0 of long mode on a virtual CPU: a
// loop, stores, page-table switches and exceptions. That /dev/kvm opens and
// answers proves nothing, since there are KVMs that pass every capability
// check and interpret a guest kernel instruction by instruction, or not at
// all. What this program proves is that such code runs, and how fast; it does
// not prove that a whole Linux boots.
//
// KVM may keep the calling thread for as long as it likes: call TryKVM in a
// process of its own that can be killed. step is called before each step.
func TryKVM(step func(string)) KVMReport {
	r := KVMReport{LoopSteps: 2 * probeLoops}
	at := func(s string) { r.Step = s; step(s) }
	at("open /dev/kvm")
	if _, err := os.Stat("/dev/kvm"); err != nil {
		r.Problem = err.Error()
		return r
	}
	r.Exists = true
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		r.Problem = err.Error()
		return r
	}
	defer f.Close()
	r.Opens = true
	runtime.LockOSThread() // a vCPU belongs to the thread that made it
	defer runtime.UnlockOSThread()
	if err := runProbe(int(f.Fd()), &r, at); err != nil {
		r.Problem = err.Error()
		return r
	}
	r.Runs = true
	return r
}

func kvmIoctl(fd int, req, arg uintptr) (int, error) {
	for {
		v, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, arg)
		if errno == 0 {
			return int(v), nil
		}
		if !errors.Is(errno, unix.EINTR) {
			return 0, errno
		}
	}
}

func runProbe(kvm int, r *KVMReport, at func(string)) error {
	at("ask for the API version")
	version, err := kvmIoctl(kvm, kvmGetAPIVersion, 0)
	if err != nil {
		return fmt.Errorf("KVM_GET_API_VERSION: %w", err)
	}
	if version != 12 {
		return fmt.Errorf("the KVM speaks version %d, and not 12", version)
	}
	at("make a virtual machine")
	vm, err := kvmIoctl(kvm, kvmCreateVM, 0)
	if err != nil {
		return fmt.Errorf("KVM_CREATE_VM: %w", err)
	}
	defer unix.Close(vm) //nolint:errcheck // the process ends soon
	// Old Intel CPUs need room for a TSS; elsewhere the call is not needed and
	// may be refused.
	_, _ = kvmIoctl(vm, kvmSetTSSAddr, 0xfffbd000)
	mem, err := unix.Mmap(-1, 0, kvmGuestMemory, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("mmap of the guest's memory: %w", err)
	}
	defer unix.Munmap(mem) //nolint:errcheck // the process ends soon
	layProbe(mem)
	region := [4]uint64{0, 0, kvmGuestMemory, uint64(uintptr(unsafe.Pointer(&mem[0])))}
	if _, err := kvmIoctl(vm, kvmSetUserMemory, uintptr(unsafe.Pointer(&region))); err != nil {
		return fmt.Errorf("KVM_SET_USER_MEMORY_REGION: %w", err)
	}
	at("make a virtual CPU")
	cpu, err := kvmIoctl(vm, kvmCreateVCPU, 0)
	if err != nil {
		return fmt.Errorf("KVM_CREATE_VCPU: %w", err)
	}
	defer unix.Close(cpu) //nolint:errcheck // the process ends soon
	if err := setProbeCPU(kvm, cpu); err != nil {
		return err
	}
	size, err := kvmIoctl(kvm, kvmGetVCPUMmapSize, 0)
	if err != nil {
		return fmt.Errorf("KVM_GET_VCPU_MMAP_SIZE: %w", err)
	}
	run, err := unix.Mmap(cpu, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mmap of the virtual CPU: %w", err)
	}
	defer unix.Munmap(run) //nolint:errcheck // the process ends soon
	return followProbe(cpu, run, r, at)
}

// followProbe runs the vCPU from mark to mark.
func followProbe(cpu int, run []byte, r *KVMReport, at func(string)) error {
	for _, s := range []struct {
		mark byte
		name string
		done func(time.Duration)
	}{
		{'a', "enter long mode in ring 0", func(time.Duration) {}},
		{'b', fmt.Sprintf("run %d million instructions", 2*probeLoops/1_000_000), func(d time.Duration) { r.LoopTime = d }},
		{'c', "write 1 MiB and read CPUID and the clock", func(time.Duration) {}},
		{'d', fmt.Sprintf("switch page tables and take an exception %d times", probeTraps), func(d time.Duration) { r.TrapTime = d / probeTraps }},
	} {
		at(s.name)
		start := time.Now()
		if _, err := kvmIoctl(cpu, kvmRun, 0); err != nil {
			return fmt.Errorf("KVM_RUN: %w", err)
		}
		reason := binary.LittleEndian.Uint32(run[kvmExitReasonOffset:])
		if reason != kvmExitIO {
			return fmt.Errorf("the virtual CPU stopped with exit reason %d", reason)
		}
		port := binary.LittleEndian.Uint16(run[kvmExitIOOffset+2:])
		data := binary.LittleEndian.Uint64(run[kvmExitIOOffset+8:])
		if port != kvmPortMark || data >= uint64(len(run)) || run[data] != s.mark {
			return fmt.Errorf("the program went astray (port %#x)", port)
		}
		s.done(time.Since(start))
	}
	return nil
}

// layProbe writes page tables, descriptor tables and the program.
func layProbe(mem []byte) {
	le := binary.LittleEndian
	le.PutUint64(mem[probePML4:], probePDPT|3)
	le.PutUint64(mem[probePDPT:], probePD|3)
	le.PutUint64(mem[probePD:], 0x83)                   // one 2 MiB page, present, writable
	le.PutUint64(mem[probeGDT+8:], 0x00af9b000000ffff)  // 64-bit code
	le.PutUint64(mem[probeGDT+16:], 0x00cf93000000ffff) // data
	le.PutUint64(mem[probeIDT+6*16:], probeTrap&0xffff|8<<16|0x8e<<40|probeTrap>>16<<48)
	code := mem[probeCode:probeCode]
	mark := func(c byte) { code = append(code, 0xb0, c, 0xe6, kvmPortMark) } // mov al, c; out PORT, al
	mark('a')
	code = append(code, 0x48, 0xc7, 0xc1) // mov rcx, probeLoops
	code = le.AppendUint32(code, probeLoops)
	code = append(code, 0x48, 0xff, 0xc9, 0x75, 0xfb) // dec rcx; jnz -5
	mark('b')
	code = append(code, 0x48, 0xc7, 0xc7) // mov rdi, probeData
	code = le.AppendUint32(code, probeData)
	code = append(code, 0x48, 0xc7, 0xc1) // mov rcx, 128 Ki quadwords
	code = le.AppendUint32(code, 1<<17)
	code = append(code, 0xf3, 0x48, 0xab)             // rep stosq
	code = append(code, 0x31, 0xc0, 0x0f, 0xa2)       // xor eax, eax; cpuid
	code = append(code, 0x0f, 0x31)                   // rdtsc
	mark('c')                                         //
	code = append(code, 0x48, 0xc7, 0xc1)             // mov rcx, probeTraps
	code = le.AppendUint32(code, probeTraps)          //
	code = append(code, 0x0f, 0x20, 0xd8)             // mov rax, cr3
	code = append(code, 0x0f, 0x22, 0xd8)             // mov cr3, rax
	code = append(code, 0x0f, 0x0b)                   // ud2
	code = append(code, 0x48, 0xff, 0xc9, 0x75, 0xf3) // dec rcx; jnz -13
	mark('d')
	_ = append(code, 0xf4) // hlt
	// The exception's handler steps over the ud2: add qword [rsp], 2; iretq.
	copy(mem[probeTrap:], []byte{0x48, 0x83, 0x04, 0x24, 0x02, 0x48, 0xcf})
}

// kvmSregs is struct kvm_sregs; kvmSegment and kvmTable are its parts.
type kvmSegment struct {
	Base                                                    uint64
	Limit                                                   uint32
	Selector                                                uint16
	Type, Present, DPL, DB, S, L, G, AVL, Unusable, Padding uint8
}
type kvmTable struct {
	Base    uint64
	Limit   uint16
	Padding [3]uint16
}
type kvmSregs struct {
	CS, DS, ES, FS, GS, SS, TR, LDT kvmSegment
	GDT, IDT                        kvmTable
	CR0, CR2, CR3, CR4, CR8         uint64
	EFER, ApicBase                  uint64
	Interrupts                      [4]uint64
}
type kvmRegs struct {
	RAX, RBX, RCX, RDX, RSI, RDI, RSP, RBP uint64
	R                                      [8]uint64
	RIP, RFLAGS                            uint64
}

// setProbeCPU puts the vCPU into long mode, ring 0, at the program's start.
func setProbeCPU(kvm, cpu int) error {
	cpuid := make([]byte, 8+kvmCPUIDEntries*kvmCPUIDEntrySize)
	binary.LittleEndian.PutUint32(cpuid, kvmCPUIDEntries)
	if _, err := kvmIoctl(kvm, kvmGetSupportedCPU, uintptr(unsafe.Pointer(&cpuid[0]))); err != nil {
		return fmt.Errorf("KVM_GET_SUPPORTED_CPUID: %w", err)
	}
	if _, err := kvmIoctl(cpu, kvmSetCPUID, uintptr(unsafe.Pointer(&cpuid[0]))); err != nil {
		return fmt.Errorf("KVM_SET_CPUID2: %w", err)
	}
	var s kvmSregs
	if _, err := kvmIoctl(cpu, kvmGetSregs, uintptr(unsafe.Pointer(&s))); err != nil {
		return fmt.Errorf("KVM_GET_SREGS: %w", err)
	}
	s.CS = kvmSegment{Limit: 0xffffffff, Selector: 8, Type: 11, Present: 1, S: 1, L: 1, G: 1}
	data := kvmSegment{Limit: 0xffffffff, Selector: 16, Type: 3, Present: 1, DB: 1, S: 1, G: 1}
	s.DS, s.ES, s.FS, s.GS, s.SS = data, data, data, data, data
	s.GDT = kvmTable{Base: probeGDT, Limit: 23}
	s.IDT = kvmTable{Base: probeIDT, Limit: 4095}
	s.CR3 = probePML4
	s.CR4 = 1 << 5                  // PAE
	s.CR0 = 1 | 1<<4 | 1<<5 | 1<<31 // PE, ET, NE, PG
	s.EFER = 1<<8 | 1<<10           // LME, LMA
	if _, err := kvmIoctl(cpu, kvmSetSregs, uintptr(unsafe.Pointer(&s))); err != nil {
		return fmt.Errorf("KVM_SET_SREGS: %w", err)
	}
	regs := kvmRegs{RIP: probeCode, RSP: probeStack, RFLAGS: 2}
	if _, err := kvmIoctl(cpu, kvmSetRegs, uintptr(unsafe.Pointer(&regs))); err != nil {
		return fmt.Errorf("KVM_SET_REGS: %w", err)
	}
	return nil
}
