package yaegi_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTLS_TrustsWhatTheUserTrusts(t *testing.T) {
	ours, other := newAuthority(t), newAuthority(t)
	local := ours.issue(t, &x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}})
	named := ours.issue(t, &x509.Certificate{DNSNames: []string{"audit.test"}})
	client, stranger := ours.issue(t, &x509.Certificate{}), other.issue(t, &x509.Certificate{})
	identified := func(identity credentials) settings {
		return settings{"rootCAs": ours.cert, "cert": identity.cert, "key": identity.key}
	}

	// With TLS 1.3 the endpoint's alert comes when the client has begun to send, so any error may be the first.
	const noClient = "error="
	tests := []struct {
		name    string
		server  credentials
		clients bool // The endpoint asks for client certificates.
		tls     settings
		failure string // What the log says when the record must not be accepted.
	}{
		{name: "authority as text", server: local, tls: settings{"rootCAs": ours.cert}},
		{name: "authorities as a list", server: local, tls: settings{"rootCAs": []any{other.cert, ours.cert}}},
		{name: "authority in a file", server: local, tls: settings{"rootCAs": []any{asFile(t, ours.cert)}}},
		{name: "authority of the system", server: local, failure: "signed by unknown authority"},
		{name: "another authority", server: local, tls: settings{"rootCAs": other.cert}, failure: "signed by unknown authority"},
		{name: "another name", server: named, tls: settings{"rootCAs": ours.cert}, failure: "127.0.0.1"},
		{name: "the server's name", server: named, tls: settings{"rootCAs": ours.cert, "serverName": "audit.test"}},
		{name: "another server's name", server: local, tls: settings{"rootCAs": ours.cert, "serverName": "audit.test"}, failure: "audit.test"},
		{name: "no verification", server: named, tls: settings{"insecureSkipVerify": "true"}},
		{name: "no client certificate", server: local, clients: true, tls: settings{"rootCAs": ours.cert}, failure: noClient},
		{name: "a stranger's client certificate", server: local, clients: true, tls: identified(stranger), failure: noClient},
		{name: "client certificate as text", server: local, clients: true, tls: identified(client)},
		{name: "client certificate in files", server: local, clients: true, tls: settings{
			"rootCAs": ours.cert, "cert": asFile(t, client.cert), "key": asFile(t, client.key),
		}},
	}
	onBothEngines(t, func(t *testing.T, e engine) {
		for _, test := range tests {
			t.Run(test.name, func(t *testing.T) {
				endpoint := startReceiver(t, func(_ http.ResponseWriter, req *http.Request) {
					assert.Equal(t, "HTTP/2.0", req.Proto)
				}, func(server *httptest.Server) {
					server.EnableHTTP2 = true
					server.TLS = test.server.serverConfig(t)
					if test.clients {
						server.TLS.ClientAuth, server.TLS.ClientCAs = tls.RequireAndVerifyClientCert, ours.pool
					}
				})
				options := settings{"rejectOnRecordError": true}
				if test.tls != nil {
					options["tls"] = test.tls
				}
				s := newTapInFrontOf(t, e, settings{"exchange": one(endpoint.URL, options)}, http.HandlerFunc(accept))

				pluginLog.take()
				for range 3 {
					resp, _ := s.do(t, http.MethodGet, "/", nil)
					if test.failure == "" {
						assert.Equal(t, http.StatusOK, resp.StatusCode)
						endpoint.next(t)
					} else {
						assert.Equal(t, http.StatusInternalServerError, resp.StatusCode)
					}
				}
				endpoint.none(t)
				if test.failure != "" {
					// Failures of the case before are told of up to a second later.
					assert.Regexp(t, test.failure, strings.Join(pluginLog.take(), "\n"))
				}
			})
		}
	})
}

func TestTLS_ErrorsNameTheOptionAndNothingSecret(t *testing.T) {
	authority := newAuthority(t)
	one, two := authority.issue(t, &x509.Certificate{}), authority.issue(t, &x509.Certificate{})
	secret := "c2VjcmV0IGtleQ"
	broken := "-----BEGIN EC PRIVATE KEY-----\n" + secret + "\n-----END EC PRIVATE KEY-----\n"
	missing := filepath.Join(t.TempDir(), "missing.pem")

	tests := []struct {
		name   string
		tls    settings
		option string
	}{
		{"no certificate", settings{"rootCAs": broken}, "response.tls.rootCAs"},
		{"no file of an authority", settings{"rootCAs": missing}, "response.tls.rootCAs"},
		{"no certificate in the file", settings{"rootCAs": asFile(t, "")}, "response.tls.rootCAs"},
		{"cert without key", settings{"cert": one.cert}, "response.tls"},
		{"key without cert", settings{"key": one.key}, "response.tls"},
		{"another one's key", settings{"cert": one.cert, "key": two.key}, "response.tls"},
		{"broken key", settings{"cert": one.cert, "key": broken}, "response.tls"},
		{"no file of a certificate", settings{"cert": missing, "key": one.key}, "response.tls.cert"},
		{"no file of a key", settings{"cert": one.cert, "key": missing}, "response.tls.key"},
		{"key without its frame", settings{"cert": one.cert, "key": secret + strings.Repeat("x", 5000)}, "response.tls.key"},
		{"key with a NUL", settings{"cert": one.cert, "key": secret + "\x00"}, "response.tls.key"},
		{"certificate and key changed round", settings{"cert": one.key, "key": one.cert}, "response.tls"},
		{"unknown", settings{"rootCA": authority.cert}, "response.tls.rootCA"},
	}
	onBothEngines(t, func(t *testing.T, e engine) {
		for _, test := range tests {
			t.Run(test.name, func(t *testing.T) {
				err := newError(t, e, settings{"response": settings{"service": "https://127.0.0.1:1", "tls": test.tls}})
				assert.Contains(t, err, test.option)
				assert.NotContains(t, err, secret)
				for _, line := range strings.Split(one.key+two.key+one.cert, "\n") {
					if line != "" && !strings.HasPrefix(line, "-----") {
						assert.NotContains(t, err, line)
					}
				}
			})
		}

		assert.Contains(t, newError(t, e, settings{"request": settings{"service": "http://127.0.0.1:1", "tls": settings{"rootCAs": authority.cert}}}), "request.tls")
		assert.Contains(t, newError(t, e, settings{"request": settings{"service": "https://127.0.0.1:1,http://127.0.0.1:1"}}), "request.service")
	})
}

func TestDelivery_SendsCredentialsAndNeverTellsThem(t *testing.T) {
	const password, token = "pass word", "Bearer token-in-a-file"
	file := asFile(t, token+"\n")
	onBothEngines(t, func(t *testing.T, e engine) {
		up := newReceiver(t, nil)
		withUser := func(url string) string { return strings.Replace(url, "://", "://user:pass%20word@", 1) }
		basic := &http.Request{Header: http.Header{}}
		basic.SetBasicAuth("user", password)

		deliver := func(service any, headers settings) (string, http.Header) {
			options := settings{"service": service, "headers": headers, "rejectOnRecordError": true}
			s := newTapInFrontOf(t, e, settings{"exchange": one("", options)}, http.HandlerFunc(accept))
			pluginLog.take()
			resp, _ := s.do(t, http.MethodGet, "/", nil)
			log := strings.Join(pluginLog.take(), "\n")
			if resp.StatusCode == http.StatusOK {
				return log, up.next(t).Header
			}

			return log, nil
		}

		_, header := deliver(withUser(up.URL), nil)
		assert.Equal(t, basic.Header.Get("Authorization"), header.Get("Authorization"))
		_, header = deliver(up.URL, settings{"Authorization": "file:" + file, "x-tenant": "one"})
		assert.Equal(t, token, header.Get("Authorization"))
		assert.Equal(t, "one", header.Get("X-Tenant"))
		_, header = deliver([]string{unusedURL(t), withUser(up.URL), up.URL}, nil)
		assert.Equal(t, basic.Header.Get("Authorization"), header.Get("Authorization"))
		_, header = deliver([]string{withUser(unusedURL(t)), up.URL}, nil)
		assert.Empty(t, header.Values("Authorization"), "credentials of one service went to another")

		refusing := newReceiver(t, status(http.StatusUnauthorized))
		for _, service := range []string{withUser(unusedURL(t)), withUser(refusing.URL)} {
			log, header := deliver(service, settings{"X-Token": "file:" + file})
			assert.Nil(t, header)
			assert.NotEmpty(t, log)
			assertNoSecret(t, log)
		}
	})
}

func TestDelivery_ErrorsOfCredentialsNameTheOptionAndNothingSecret(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	tests := []struct {
		name   string
		config settings
		option string
	}{
		{"no file of a header", settings{"service": "http://127.0.0.1:1", "headers": settings{"X-Token": "file:" + missing}}, "exchange.headers: X-Token"},
		{"a header that cannot be", settings{"service": "http://127.0.0.1:1", "headers": settings{"X-Token": "token-in-\na-file"}}, "exchange.headers: the value of X-Token"},
		{"a file that cannot be a header", settings{"service": "http://127.0.0.1:1", "headers": settings{"X-Token": "file:" + asFile(t, "token-in-\na-file")}}, "X-Token"},
		{"a URL that cannot be", settings{"service": "http://user:pass word@127.0.0.1:x"}, "exchange.service"},
		{"another scheme", settings{"service": "ftp://user:pass%20word@127.0.0.1"}, "exchange.service"},
		{"a query string", settings{"service": "http://user:pass%20word@127.0.0.1/?a"}, "exchange.service"},
		{"a path that cannot be", settings{"service": "http://user:pass%20word@127.0.0.1", "path": "/%zz"}, "exchange.path"},
	}
	onBothEngines(t, func(t *testing.T, e engine) {
		for _, test := range tests {
			t.Run(test.name, func(t *testing.T) {
				err := newError(t, e, settings{"exchange": test.config})
				assert.Contains(t, err, test.option)
				assertNoSecret(t, err)
			})
		}
	})
}

func assertNoSecret(t *testing.T, text string) {
	t.Helper()
	for _, secret := range []string{"pass word", "pass%20word", "user:", "token-in-", "Basic "} {
		assert.NotContains(t, text, secret)
	}
}

// newError returns the error of settings that do not fit.
func newError(t *testing.T, e engine, config settings) string {
	t.Helper()
	_, err := e.plugin.New(t.Context(), http.HandlerFunc(accept), config, "audit@file")
	require.Error(t, err)

	return err.Error()
}

// credentials are a certificate and its key in PEM.
type credentials struct {
	cert, key string
}

func (c credentials) serverConfig(t *testing.T) *tls.Config {
	t.Helper()
	pair, err := tls.X509KeyPair([]byte(c.cert), []byte(c.key))
	require.NoError(t, err)

	return &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
}

// authority is a private certificate authority.
type authority struct {
	credentials
	certificate *x509.Certificate
	private     *ecdsa.PrivateKey
	pool        *x509.CertPool
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	a := &authority{private: private, pool: x509.NewCertPool()}
	template := &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	a.certificate = template
	a.credentials = a.sign(t, template, private)
	block, _ := pem.Decode([]byte(a.cert))
	a.certificate, err = x509.ParseCertificate(block.Bytes)
	require.NoError(t, err)
	a.pool.AddCert(a.certificate)

	return a
}

// issue makes a certificate for servers and clients.
func (a *authority) issue(t *testing.T, template *x509.Certificate) credentials {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}

	return a.sign(t, template, private)
}

func (a *authority) sign(t *testing.T, template *x509.Certificate, private *ecdsa.PrivateKey) credentials {
	t.Helper()
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	require.NoError(t, err)
	template.SerialNumber = serial
	template.Subject = pkix.Name{CommonName: "test " + serial.String()}
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, &private.PublicKey, a.private)
	require.NoError(t, err)
	key, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(t, err)

	return credentials{
		cert: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		key:  string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})),
	}
}

// asFile returns the name of a file with this text.
func asFile(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))

	return file
}
