package sandbox

// Quotas bound what a project may have at once; 0 is no bound. Disk counts what
// sandboxes may write and what snapshots hold.
type Quotas struct {
	Running   int   `json:"running"`   // sandboxes with a machine
	Suspended int   `json:"suspended"` // sandboxes without one, the stopped and failed included
	MilliCPU  int   `json:"milli_cpu"` // of sandboxes with a machine
	MemoryMiB int   `json:"memory_mib"`
	DiskMiB   int64 `json:"disk_mib"`
	Snapshots int   `json:"snapshots"` // named ones
}

// Usage is what a project, or a whole host, has now, in the units of Quotas.
type Usage struct {
	Running   int   `json:"running"`
	Suspended int   `json:"suspended"`
	MilliCPU  int   `json:"milli_cpu"`
	MemoryMiB int   `json:"memory_mib"`
	DiskMiB   int64 `json:"disk_mib"`
	Snapshots int   `json:"snapshots"`
}

// Capacity is what a host lends to sandboxes. The sums over sandboxes that have
// a machine must stay within MilliCPU and MemoryMiB (0 is no bound); new ones are
// refused while DiskFree lies below DiskFloor.
type Capacity struct {
	MilliCPU  int   `json:"milli_cpu"`
	MemoryMiB int   `json:"memory_mib"`
	DiskFree  int64 `json:"disk_free"`  // bytes, now
	DiskFloor int64 `json:"disk_floor"` // bytes that stay free
	// Drivers are what its machines run on; a sandbox that asks for one gets
	// that one or is refused. None: the host does not tell.
	Drivers []DriverStatus `json:"drivers,omitempty"`
}
