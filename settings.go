package tap

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"time"
)

// endpointSettings is all that makes one endpoint differ from another.
type endpointSettings struct {
	targets []targetSettings
	headers http.Header
	// timeout bounds a delivery; 0 does not.
	timeout time.Duration
	// attempts is how many times a record is tried, interval the pause before the second time.
	attempts int
	interval time.Duration
	// tls is nil for the defaults of net/http. tlsKey is the same for the same TLS settings.
	tls    *tls.Config
	tlsKey string
	// maxBatch is how many records go in one POST, maxPending how many may wait for delivery; 0: the handler waits itself.
	maxBatch, maxPending int
}

// targetSettings is one URL that records are POSTed to, without its credentials.
type targetSettings struct {
	url           string
	authorization string
}

// parseSettings reads what a kind of record says about its endpoint. Errors name the option, and nothing secret.
func parseSettings(name string, config *RecordConfig) (endpointSettings, error) {
	s := endpointSettings{headers: http.Header{}}

	var err error
	if s.targets, err = parseTargets(name, config.Service, strings.TrimSpace(config.Path)); err != nil {
		return s, err
	}
	if err = parseHeaders(name+".headers", config.Headers, s.headers); err != nil {
		return s, err
	}
	if s.timeout, err = parseDuration(name+".timeout", config.Timeout, defaultTimeout); err != nil {
		return s, err
	}
	if s.attempts, s.interval, err = parseRetry(name+".retry", config.Retry); err != nil {
		return s, err
	}
	if s.tls, s.tlsKey, err = parseTLS(name+".tls", config.TLS); err != nil {
		return s, err
	}
	if s.tls != nil && !strings.HasPrefix(s.targets[0].url, "https:") {
		return s, fmt.Errorf("%s.tls: the URL in %s.service is not https", name, name)
	}
	if s.maxBatch, err = parseCount(name+".maxBatchSize", config.MaxBatchSize, 1, 1); err != nil {
		return s, err
	}
	if s.maxPending, err = parseCount(name+".maxPending", config.MaxPending, 0, 0); err != nil {
		return s, err
	}
	if s.maxPending > 0 && config.RejectOnRecordError {
		return s, fmt.Errorf("%s.maxPending: with %s.rejectOnRecordError no record can be left pending", name, name)
	}

	return s, nil
}

// parseTargets returns the URLs that records are POSTed to, in the user's order.
func parseTargets(name string, services []string, path string) ([]targetSettings, error) {
	var targets []targetSettings
	for _, service := range services {
		if service = strings.TrimSpace(service); service == "" {
			continue
		}
		target, err := parseURL(name, service, path)
		if err != nil {
			return nil, err
		}
		if len(targets) > 0 && strings.HasPrefix(targets[0].url, "https:") != (target.Scheme == "https") {
			return nil, fmt.Errorf("%s.service: either all URLs are https or none", name)
		}
		targets = append(targets, withoutUser(target))
	}
	if len(targets) == 0 {
		return nil, fmt.Errorf("%s.service: the URL of the endpoint is missing", name)
	}

	return targets, nil
}

// parseURL returns a URL that records are POSTed to. What it says of a wrong one must not repeat it: there may be a password in it.
func parseURL(name, service, path string) (*url.URL, error) {
	base, err := url.Parse(service)
	if err != nil || base.Scheme != "http" && base.Scheme != "https" || base.Hostname() == "" {
		return nil, fmt.Errorf("%s.service: not an http or https URL with a host", name)
	}
	if base.RawQuery != "" || base.ForceQuery || base.Fragment != "" {
		return nil, fmt.Errorf("%s.service: a query string belongs into %s.path, and a fragment nowhere", name, name)
	}

	if path == "" {
		if base.Path == "" {
			base.Path = "/"
		}

		return base, nil
	}
	if !strings.HasPrefix(path, "/") {
		path = "/" + path
	}
	// Joined as text: the query string, and what is escaped on either side, stay as they are.
	target, err := url.Parse(strings.TrimSuffix(service, "/") + path)
	if err != nil || target.Fragment != "" {
		return nil, fmt.Errorf("%s.path: not a path with an optional query string", name)
	}

	return target, nil
}

// withoutUser takes the credentials out of a URL, which may stand in an error of net/http, and makes Basic authentication of them.
func withoutUser(target *url.URL) targetSettings {
	if target.User == nil {
		return targetSettings{url: target.String()}
	}

	password, _ := target.User.Password()
	basic := &http.Request{Header: http.Header{}}
	basic.SetBasicAuth(target.User.Username(), password)
	target.User = nil

	return targetSettings{url: target.String(), authorization: basic.Header.Get("Authorization")}
}

// headerName and headerValue are what may stand in an HTTP header: RFC 9110, sections 5.1 and 5.5.
var (
	headerName  = regexp.MustCompile("^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")
	headerValue = regexp.MustCompile(`^[^\x00-\x08\x0a-\x1f\x7f]*$`)
)

// ownHeaders are set by the tap, or by net/http, on every POST.
var ownHeaders = []string{"Content-Type", "Content-Length", "Idempotency-Key", "Transfer-Encoding", "X-Tap-Id", "X-Tap-Record"}

// fromFile starts the value of a header that stands in a file, so that a secret need not stand in the configuration.
const fromFile = "file:"

func parseHeaders(option string, configured map[string]string, headers http.Header) error {
	for name, value := range configured {
		if !headerName.MatchString(name) {
			return fmt.Errorf("%s: %q is not the name of a header", option, name)
		}
		for _, own := range ownHeaders {
			if strings.EqualFold(name, own) {
				return fmt.Errorf("%s: %s is set by the tap itself", option, name)
			}
		}
		if strings.HasPrefix(value, fromFile) {
			text, err := os.ReadFile(strings.TrimPrefix(value, fromFile))
			if err != nil {
				return fmt.Errorf("%s: %s: %w", option, name, err)
			}
			value = strings.TrimSpace(string(text))
		}
		if !headerValue.MatchString(value) {
			return fmt.Errorf("%s: the value of %s has a character that a header cannot have", option, name)
		}
		if headers.Get(name) != "" {
			return fmt.Errorf("%s: %s is there twice, in different letter case", option, http.CanonicalHeaderKey(name))
		}
		headers.Set(name, value)
	}

	return nil
}

func parseRetry(option string, config *RetryConfig) (int, time.Duration, error) {
	if config == nil {
		return 1, 0, nil
	}
	if err := refuseUnknown(option+".", config.Unknown); err != nil {
		return 0, 0, err
	}
	attempts, err := parseCount(option+".attempts", config.Attempts, 1, 1)
	if err != nil {
		return 0, 0, err
	}
	interval, err := parseDuration(option+".initialInterval", config.InitialInterval, defaultInterval)

	return attempts, interval, err
}

// parseTLS returns the TLS settings, and a text that is the same for the same settings: by what stands in the files, so that
// a renewed certificate is used from the next change of Traefik's configuration on.
func parseTLS(option string, config *TLSConfig) (*tls.Config, string, error) {
	if config == nil {
		return nil, "", nil
	}
	if err := refuseUnknown(option+".", config.Unknown); err != nil {
		return nil, "", err
	}

	parsed := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: config.ServerName, InsecureSkipVerify: config.InsecureSkipVerify} //nolint:gosec // The user's choice.
	key := sha256.New()
	_, _ = fmt.Fprintf(key, "%q %t", config.ServerName, config.InsecureSkipVerify)

	for _, authority := range config.RootCAs {
		text, err := readPEM(option+".rootCAs", authority)
		if err != nil {
			return nil, "", err
		}
		if parsed.RootCAs == nil {
			parsed.RootCAs = x509.NewCertPool()
		}
		if !parsed.RootCAs.AppendCertsFromPEM(text) {
			return nil, "", fmt.Errorf("%s.rootCAs: no certificate in PEM format", option)
		}
		_, _ = fmt.Fprintf(key, " %q", text)
	}

	if (config.Cert == "") != (config.Key == "") {
		return nil, "", fmt.Errorf("%s: cert and key are needed together", option)
	}
	if config.Cert != "" {
		cert, err := readPEM(option+".cert", config.Cert)
		if err != nil {
			return nil, "", err
		}
		private, err := readPEM(option+".key", config.Key)
		if err != nil {
			return nil, "", err
		}
		pair, err := tls.X509KeyPair(cert, private)
		if err != nil {
			return nil, "", fmt.Errorf("%s: cert and key: %w", option, err)
		}
		parsed.Certificates = []tls.Certificate{pair}
		_, _ = fmt.Fprintf(key, " %q %q", cert, private)
	}

	return parsed, hex.EncodeToString(key.Sum(nil)), nil
}

// readPEM takes the text itself or the name of a file, as Traefik does. What it says of a wrong one must not repeat a key.
func readPEM(option, textOrFile string) ([]byte, error) {
	if strings.Contains(textOrFile, "-----BEGIN") {
		return []byte(textOrFile), nil
	}

	text, err := os.ReadFile(strings.TrimSpace(textOrFile))
	if err != nil {
		// Only the cause: the name may be a key that was meant to be PEM text.
		return nil, fmt.Errorf("%s: neither PEM text nor a file that can be read: %w", option, errors.Unwrap(err))
	}

	return text, nil
}

// parseCount takes a number that is least or more.
func parseCount(option string, count *int, byDefault, least int) (int, error) {
	if count == nil {
		return byDefault, nil
	}
	if *count < least {
		return 0, fmt.Errorf("%s: %d is less than %d", option, *count, least)
	}

	return *count, nil
}

// parseSize takes a number of bytes, or -1 for no limit.
func parseSize(option string, size *int64, byDefault int64) (int64, error) {
	if size == nil {
		return byDefault, nil
	}
	if *size < -1 {
		return 0, fmt.Errorf("%s: %d is neither a number of bytes nor -1 for no limit", option, *size)
	}
	if *size == -1 || *size > unlimited {
		return unlimited, nil
	}

	return *size, nil
}

// parseDuration takes a Go duration or a number of seconds, as Traefik's own options do.
func parseDuration(option, text string, byDefault time.Duration) (time.Duration, error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return byDefault, nil
	}

	withUnit := text
	if _, err := strconv.Atoi(text); err == nil {
		withUnit += "s"
	}
	duration, err := time.ParseDuration(withUnit)
	if err != nil || duration < 0 {
		return 0, fmt.Errorf("%s: %q is not a duration such as 500ms or 10s", option, text)
	}

	return duration, nil
}

func refuseUnknown(prefix string, unknown map[string]interface{}) error {
	if len(unknown) == 0 {
		return nil
	}

	names := make([]string, 0, len(unknown))
	for name := range unknown {
		names = append(names, prefix+name)
	}
	sort.Strings(names)

	return fmt.Errorf("%s: no such option", strings.Join(names, ", "))
}

// endpointKey is the same for the same settings, and for no others. It is a hash, since there are secrets in them.
func endpointKey(s endpointSettings) string {
	names := make([]string, 0, len(s.headers))
	for name := range s.headers {
		names = append(names, name)
	}
	sort.Strings(names)

	hash := sha256.New()
	_, _ = fmt.Fprintf(hash, "%d %d %d %q %d %d", s.timeout, s.attempts, s.interval, s.tlsKey, s.maxBatch, s.maxPending)
	for _, target := range s.targets {
		_, _ = fmt.Fprintf(hash, " %q %q", target.url, target.authorization)
	}
	for _, name := range names {
		_, _ = fmt.Fprintf(hash, " %q: %q", name, s.headers[name])
	}

	return hex.EncodeToString(hash.Sum(nil))
}
