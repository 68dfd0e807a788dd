package main

import (
	"encoding/hex"
	"fmt"
	"net"
	"syscall"
)

// frame sends one frame of the caller's making through eth0, or says that the
// kernel refuses it.
func frame(a []string) {
	b, err := hex.DecodeString(a[0])
	check(err)
	eth0, err := net.InterfaceByName("eth0")
	check(err)
	fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW, 0)
	if err == nil {
		err = syscall.Sendto(fd, b, 0, &syscall.SockaddrLinklayer{Ifindex: eth0.Index, Halen: 6})
	}
	if err != nil {
		fmt.Print("refused: ", err)
		return
	}
	fmt.Print("sent")
}
