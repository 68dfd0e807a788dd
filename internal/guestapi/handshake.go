// Package guestapi is what a node and the agent in a sandbox say to each
// other: the protobuf service (guestv1, generated from guest.proto) and, in
// this file, the handshake that every connection begins with.
//
// The agent dials. The host speaks first: the magic "CLO1" and a 32-byte
// nonce. The agent answers with a Hello, the host with a HelloAnswer, both as
// a 32-bit big-endian length and a protobuf message. After an answer that is
// ok the connection carries HTTP/2 with the host as its client.
//
// Any process of the guest may be on the other end, so the host's side reads
// at most MaxMessage bytes, allocates no more than what has arrived, and
// believes nothing but the proof. Callers set the connection's deadline.
//
// internal/node/guestlink and internal/guest/agent call it.
package guestapi

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"

	"cloche.dev/cloche/internal/guestapi/guestv1"
)

// The versions of the protocol that this build speaks.
const (
	MinVersion = 1
	MaxVersion = 1
)

// What a connection is for.
const (
	PurposeControl = "control" // the one that carries everything small
	PurposeExtra   = "extra"   // one that the host asked for with OpenExtra
)

const (
	// MaxMessage bounds each message of the handshake.
	MaxMessage = 4096
	// KeySize is the length of a sandbox's key.
	KeySize = 32
	// NonceSize is the length of a challenge.
	NonceSize = 32

	magic      = "CLO1"
	proofLabel = "cloche hello 1"
)

// ErrHandshake is the kind of every error about what the peer sent, as
// opposed to errors of the connection.
var ErrHandshake = errors.New("bad handshake")

// Nonce is one connection's challenge.
type Nonce [NonceSize]byte

// NewKey returns a fresh key for a sandbox.
func NewKey() []byte {
	key := make([]byte, KeySize)
	rand.Read(key) // never fails (crypto/rand documents that it crashes instead)
	return key
}

// Challenge is the host's first word: it writes the magic and a fresh nonce.
func Challenge(w io.Writer) (Nonce, error) {
	var n Nonce
	rand.Read(n[:])
	_, err := w.Write(append([]byte(magic), n[:]...))
	return n, err
}

// ReadChallenge reads the host's first word.
func ReadChallenge(r io.Reader) (Nonce, error) {
	var buf [len(magic) + NonceSize]byte
	if _, err := io.ReadFull(r, buf[:]); err != nil {
		return Nonce{}, err
	}
	if string(buf[:len(magic)]) != magic {
		return Nonce{}, fmt.Errorf("%w: this is no host of Cloche", ErrHandshake)
	}
	return Nonce(buf[len(magic):]), nil
}

// Proof proves that its maker holds key, for this connection and purpose alone.
func Proof(key []byte, nonce Nonce, purpose, ticket string) []byte {
	m := hmac.New(sha256.New, key)
	m.Write([]byte(proofLabel))
	m.Write(nonce[:])
	m.Write([]byte(purpose))
	m.Write([]byte{0})
	m.Write([]byte(ticket))
	return m.Sum(nil)
}

// Proves tells whether hello carries the proof for key and nonce.
func Proves(hello *guestv1.Hello, key []byte, nonce Nonce) bool {
	return hmac.Equal(hello.GetProof(), Proof(key, nonce, hello.GetPurpose(), hello.GetTicket()))
}

// Negotiate returns the newest version that both this build and a peer that
// speaks least to most can speak.
func Negotiate(least, most uint32) (uint32, bool) {
	v := min(most, MaxVersion)
	return v, v >= MinVersion && v >= least
}

// WriteHello writes the agent's Hello.
func WriteHello(w io.Writer, hello *guestv1.Hello) error { return writeMessage(w, hello) }

// ReadHello reads a Hello. Its sender is not trusted.
func ReadHello(r io.Reader) (*guestv1.Hello, error) {
	hello := new(guestv1.Hello)
	if err := readMessage(r, hello); err != nil {
		return nil, err
	}
	switch {
	case hello.GetPurpose() != PurposeControl && hello.GetPurpose() != PurposeExtra:
		return nil, fmt.Errorf("%w: unknown purpose", ErrHandshake)
	case (hello.GetTicket() != "") != (hello.GetPurpose() == PurposeExtra):
		return nil, fmt.Errorf("%w: a ticket belongs to an extra connection", ErrHandshake)
	case len(hello.GetProof()) != 0 && len(hello.GetProof()) != sha256.Size:
		return nil, fmt.Errorf("%w: a proof has %d bytes", ErrHandshake, sha256.Size)
	}
	return hello, nil
}

// WriteAnswer writes the host's answer.
func WriteAnswer(w io.Writer, answer *guestv1.HelloAnswer) error { return writeMessage(w, answer) }

// ReadAnswer reads the host's answer.
func ReadAnswer(r io.Reader) (*guestv1.HelloAnswer, error) {
	answer := new(guestv1.HelloAnswer)
	if err := readMessage(r, answer); err != nil {
		return nil, err
	}
	if n := len(answer.GetKey()); n != 0 && n != KeySize {
		return nil, fmt.Errorf("%w: a key has %d bytes", ErrHandshake, KeySize)
	}
	return answer, nil
}

func writeMessage(w io.Writer, m proto.Message) error {
	buf, err := proto.MarshalOptions{}.MarshalAppend(make([]byte, 4, 256), m)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrHandshake, err)
	}
	if len(buf)-4 > MaxMessage {
		return fmt.Errorf("%w: message of %d bytes", ErrHandshake, len(buf)-4)
	}
	binary.BigEndian.PutUint32(buf, uint32(len(buf)-4))
	_, err = w.Write(buf)
	return err
}

func readMessage(r io.Reader, m proto.Message) error {
	var buf [MaxMessage]byte
	if _, err := io.ReadFull(r, buf[:4]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(buf[:4])
	if n > MaxMessage {
		return fmt.Errorf("%w: message of %d bytes", ErrHandshake, n)
	}
	if _, err := io.ReadFull(r, buf[:n]); err != nil {
		return err
	}
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(buf[:n], m); err != nil {
		return fmt.Errorf("%w: not a message", ErrHandshake)
	}
	return nil
}
