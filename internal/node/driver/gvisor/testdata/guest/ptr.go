package main

import "unsafe"

func ptr(b []byte) uintptr { return uintptr(unsafe.Pointer(&b[0])) }
