package dataplane

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/httpapi/rest"
)

// small makes one bounded call to the agent of a sandbox that runs; where it
// changes something, it may wake the sandbox for it.
func (p *Plane) small(w http.ResponseWriter, r *http.Request, sandboxID string, call func(context.Context, guestv1connect.GuestClient) error) bool {
	ready := p.awake
	if r.Method == http.MethodGet {
		ready = p.running
	}
	err := ready(r.Context(), sandboxID)
	if err == nil {
		ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
		defer cancel()
		var client guestv1connect.GuestClient
		if client, err = p.o.Guests.Client(ctx, sandboxID); err == nil {
			err = call(ctx, client)
		}
	}
	if err != nil {
		rest.Fail(w, r, guestapi.FromRPC(err))
		return false
	}
	return true
}

// StatFile answers what a path is.
func (p *Plane) StatFile(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, params api.StatFileParams) {
	var info api.FileInfo
	ok := p.small(w, r, sandboxID, func(ctx context.Context, g guestv1connect.GuestClient) (err error) {
		follow := params.Follow == nil || *params.Follow
		info, err = stat(ctx, g, params.Path, follow)
		return err
	})
	if ok {
		rest.JSON(w, r, http.StatusOK, info)
	}
}

func stat(ctx context.Context, g guestv1connect.GuestClient, path string, follow bool) (api.FileInfo, error) {
	answer, err := g.Stat(ctx, connect.NewRequest(&guestv1.StatRequest{Path: path, Follow: follow}))
	if err != nil {
		return api.FileInfo{}, err
	}
	if answer.Msg.GetInfo() == nil {
		return api.FileInfo{}, guestFault("a stat without an answer")
	}
	return fileInfo(answer.Msg.GetInfo()), nil
}

// fileInfo bounds and shows what a guest says of a file.
func fileInfo(f *guestv1.FileInfo) api.FileInfo {
	kind := api.FileType(f.GetType())
	if !kind.Valid() {
		kind = api.TypeOther
	}
	return api.FileInfo{
		Name: guestPath(f.GetName()), Type: kind, Size: int64(min(f.GetSize(), math.MaxInt64)),
		Mode: fmt.Sprintf("%04o", f.GetMode()&0o7777), Uid: int64(f.GetUid()), Gid: int64(f.GetGid()),
		ModifiedAt: time.Unix(0, f.GetMtimeUnixNano()).UTC(), Target: guestPath(f.GetTarget()),
	}
}

// guestPath bounds a name that a guest gave. It may hold anything but what no
// name can.
func guestPath(s string) string {
	if len(s) > 4096 {
		s = s[:4096]
	}
	return s
}

// ListFiles answers a directory's entries, by name, up to a bound.
func (p *Plane) ListFiles(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, params api.ListFilesParams) {
	list := api.FileList{Items: []api.FileInfo{}}
	ok := p.small(w, r, sandboxID, func(ctx context.Context, g guestv1connect.GuestClient) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := g.List(ctx, connect.NewRequest(&guestv1.ListRequest{Path: params.Path}))
		if err != nil {
			return err
		}
		text := 0
		for stream.Receive() {
			for _, f := range stream.Msg().GetEntries() {
				text += len(f.GetName()) + len(f.GetTarget())
				if len(list.Items) == maxListed || text > maxListedText {
					list.Truncated = true
					cancel()
					return nil
				}
				list.Items = append(list.Items, fileInfo(f))
			}
		}
		return stream.Err()
	})
	if !ok {
		return
	}
	slices.SortFunc(list.Items, func(a, b api.FileInfo) int { return cmp.Compare(a.Name, b.Name) })
	rest.JSON(w, r, http.StatusOK, list)
}

// MakeDirectory makes a directory.
func (p *Plane) MakeDirectory(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam) {
	var body api.MkdirRequest
	if _, err := rest.Decode(w, r, &body); err != nil {
		rest.Fail(w, r, err)
		return
	}
	ok := p.small(w, r, sandboxID, func(ctx context.Context, g guestv1connect.GuestClient) error {
		_, err := g.Mkdir(ctx, connect.NewRequest(&guestv1.MkdirRequest{
			Path: body.Path, Mode: fileMode(body.Mode, 0o755), Parents: body.Parents, User: body.User,
		}))
		return err
	})
	if ok {
		rest.NoContent(w)
	}
}

// fileMode reads an octal mode that the contract has checked.
func fileMode(s string, missing uint32) uint32 {
	mode, err := strconv.ParseUint(s, 8, 32)
	if err != nil {
		return missing
	}
	return uint32(mode)
}

// MoveFile moves or renames.
func (p *Plane) MoveFile(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam) {
	var body api.MoveRequest
	if _, err := rest.Decode(w, r, &body); err != nil {
		rest.Fail(w, r, err)
		return
	}
	ok := p.small(w, r, sandboxID, func(ctx context.Context, g guestv1connect.GuestClient) error {
		_, err := g.Move(ctx, connect.NewRequest(&guestv1.MoveRequest{From: body.From, To: body.To}))
		return err
	})
	if ok {
		rest.NoContent(w)
	}
}

// RemoveFile removes a file or a tree.
func (p *Plane) RemoveFile(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, params api.RemoveFileParams) {
	ok := p.small(w, r, sandboxID, func(ctx context.Context, g guestv1connect.GuestClient) error {
		_, err := g.Remove(ctx, connect.NewRequest(&guestv1.RemoveRequest{Path: params.Path, Recursive: params.Recursive}))
		return err
	})
	if ok {
		rest.NoContent(w)
	}
}
