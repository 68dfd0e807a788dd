//go:build !amd64

package sys

import "os"

// TryKVM opens /dev/kvm. The probe program exists for amd64 only, so that on
// other machines Runs stays false.
func TryKVM(step func(string)) KVMReport {
	step("open /dev/kvm")
	r := KVMReport{Step: "open /dev/kvm"}
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
	r.Problem = "no probe program for this kind of CPU"
	return r
}
