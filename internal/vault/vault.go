// Package vault seals the values of secrets and the keys of authorities for
// the store. What holds: each value is encrypted under a data key of its own,
// bound to its project and id; the data key is kept beside it, wrapped by the
// key file or by a command that asks a key service; and no error repeats a
// value, a key, or what the command wrote.
//
// A sealed value is
//
//	1 byte   how the data key is wrapped: 1 by the key file, 2 by the command
//	2 bytes  the length of the wrapped key
//	…        the wrapped key; by the key file: 8 bytes that tell which, nonce, AES-256-GCM
//	…        nonce and AES-256-GCM of the value, which authenticates all before it too
//
// The command is run with one more argument, "wrap" or "unwrap", the key in
// base64 on its standard input and CLOCHE_PROJECT and CLOCHE_SECRET in its
// environment (a key service's encryption context); it answers in base64 on its standard output.
// Where there is a command the key file only opens what was sealed before it.
//
// internal/server makes one and hands it to internal/control.
package vault

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"

	"cloche.dev/cloche/internal/sandbox"
)

const (
	keySize    = 32
	keyIDSize  = 8
	maxWrapped = 8 << 10
	maxPlain   = 1 << 20

	byFile    = 1
	byCommand = 2
)

// Options say where the keys' key is.
type Options struct {
	// KeyFile holds it. It is made, for its owner's eyes only, if it isn't
	// there and there is no Command.
	KeyFile string
	// Command wraps and unwraps data keys; nil: the key file does.
	Command []string
}

// Vault seals and opens. It is for use by many goroutines.
type Vault struct {
	key     cipher.AEAD // nil: there is no key file
	keyID   [keyIDSize]byte
	command []string
	running chan struct{} // tokens, for commands
}

// Open makes a Vault.
func Open(o Options) (*Vault, error) {
	v := &Vault{command: o.Command, running: make(chan struct{}, maxCommands)}
	if o.KeyFile == "" {
		if len(o.Command) == 0 {
			return nil, sandbox.Errorf(sandbox.Invalid, "vault_key", "there is neither a key file nor a key command")
		}
		return v, nil
	}
	key, err := readKey(o.KeyFile, len(o.Command) == 0)
	if err != nil {
		return nil, err
	}
	if key == nil {
		return v, nil
	}
	id := sha256.Sum256(append([]byte("cloche vault key id\x00"), key...))
	copy(v.keyID[:], id[:])
	v.key, err = gcm(key)
	return v, err
}

func gcm(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// bound is what a value is bound to, in one reading only.
func bound(purpose, project, id string, rest []byte) []byte {
	b := []byte("cloche " + purpose + "\x00")
	for _, s := range []string{project, id} {
		b = binary.BigEndian.AppendUint32(b, uint32(len(s)))
		b = append(b, s...)
	}
	return append(b, rest...)
}

// Seal encrypts plain for the store. Only Open with the same project and id
// opens it.
func (v *Vault) Seal(ctx context.Context, project, id string, plain []byte) ([]byte, error) {
	if len(plain) > maxPlain {
		return nil, sandbox.Errorf(sandbox.Invalid, "secret_too_large", "a sealed value has at most %d bytes", maxPlain)
	}
	key := make([]byte, keySize)
	rand.Read(key) // never fails
	var (
		wrapped []byte
		err     error
		how     = byte(byFile)
	)
	if len(v.command) > 0 {
		how = byCommand
		wrapped, err = v.run(ctx, "wrap", project, id, key)
		if err == nil && bytes.Contains(wrapped, key) {
			err = sandbox.Errorf(sandbox.FailedPrecondition, "vault_command", "the key command doesn't encrypt")
		}
	} else {
		wrapped = v.key.Seal(v.keyID[:], nil, key, bound("key", project, id, nil))
	}
	if err != nil {
		return nil, err
	}
	aead, err := gcm(key)
	if err != nil {
		return nil, err
	}
	out := append(binary.BigEndian.AppendUint16([]byte{how}, uint16(len(wrapped))), wrapped...)
	return aead.Seal(out, nil, plain, bound("value", project, id, out)), nil
}

// Open decrypts what Seal made.
func (v *Vault) Open(ctx context.Context, project, id string, sealed []byte) ([]byte, error) {
	if len(sealed) < 3 || len(sealed) > maxPlain+maxWrapped+64 {
		return nil, damaged(id)
	}
	size := 3 + int(binary.BigEndian.Uint16(sealed[1:]))
	if size > len(sealed) {
		return nil, damaged(id)
	}
	key, err := v.unwrap(ctx, project, id, sealed[0], sealed[3:size])
	if err != nil {
		return nil, err
	}
	if len(key) != keySize {
		return nil, damaged(id)
	}
	aead, err := gcm(key)
	if err != nil {
		return nil, err
	}
	plain, err := aead.Open(nil, nil, sealed[size:], bound("value", project, id, sealed[:size:size]))
	if err != nil {
		return nil, damaged(id)
	}
	return plain, nil
}

func (v *Vault) unwrap(ctx context.Context, project, id string, how byte, wrapped []byte) ([]byte, error) {
	switch how {
	case byFile:
		if len(wrapped) < keyIDSize {
			return nil, damaged(id)
		}
		if v.key == nil || !bytes.Equal(wrapped[:keyIDSize], v.keyID[:]) {
			return nil, sandbox.Errorf(sandbox.FailedPrecondition, "vault_key", "%s was sealed under another key file", id).
				WithHint("put back the key file that was there then, or set the secret anew")
		}
		key, err := v.key.Open(nil, nil, wrapped[keyIDSize:], bound("key", project, id, nil))
		if err != nil {
			return nil, damaged(id)
		}
		return key, nil
	case byCommand:
		if len(v.command) == 0 {
			return nil, sandbox.Errorf(sandbox.FailedPrecondition, "vault_key", "%s was sealed with a key command, and none is set", id)
		}
		return v.run(ctx, "unwrap", project, id, wrapped)
	}
	return nil, damaged(id)
}

var errDamaged = errors.New("it was changed, or belongs to something else")

func damaged(id string) error {
	return sandbox.Errorf(sandbox.Internal, "vault_damaged", "the sealed value of %s can't be opened: %w", id, errDamaged).
		WithHint("set the secret anew")
}
