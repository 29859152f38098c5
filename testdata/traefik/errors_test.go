package traefik_test

import (
	"context"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
)

const (
	someURL = "http://endpoint.example"
	// cannotDecode starts an error of Traefik itself.
	cannotDecode = "plugin: failed to decode configuration: 1 error(s) decoding:\n\n* "
)

// Traefik logs these behind the name of the router and of the middleware, and does not serve the router.
func TestTap_NamesWhatIsWrongWithItsSettings(t *testing.T) {
	exchange := func(options settings) settings {
		kind := settings{"service": someURL}
		for name, value := range options {
			kind[name] = value
		}

		return settings{"exchange": kind}
	}
	cases := map[string]struct {
		config settings
		want   string
	}{
		"nothing to record": {
			settings{}, "one of request, response and exchange is needed: nothing would be recorded",
		},
		"unknown option": {
			settings{"metricPath": "/metrics", "exchange": settings{"service": someURL}}, "metricPath: no such option",
		},
		"unknown option of a kind": {
			exchange(settings{"recordBodies": true}), "exchange.recordBodies: no such option",
		},
		"unknown option of retry": {
			exchange(settings{"retry": settings{"attempt": 3}}), "exchange.retry.attempt: no such option",
		},
		"unknown option of tls": {
			exchange(settings{"tls": settings{"rootCA": "ca.pem"}}), "exchange.tls.rootCA: no such option",
		},
		"no URL": {
			settings{"request": settings{"recordBody": true}}, "request.service: the URL of the endpoint is missing",
		},
		"a service of Traefik in place of a URL": {
			exchange(settings{"service": "audit@docker"}), "exchange.service: not an http or https URL with a host",
		},
		"duration": {
			exchange(settings{"timeout": "5 seconds"}), `exchange.timeout: "5 seconds" is not a duration such as 500ms or 10s`,
		},
		"size": {
			exchange(settings{"maxRecordBodySize": -2}), "exchange.maxRecordBodySize: -2 is neither a number of bytes nor -1 for no limit",
		},
		"number": {
			exchange(settings{"maxBatchSize": 0}), "exchange.maxBatchSize: 0 is less than 1",
		},
		"option of another kind": {
			exchange(settings{"requestHeaders": []string{"X-Request-Id"}}), "exchange.requestHeaders: only response records take it, the others have all headers of the request",
		},
		"options that exclude each other": {
			exchange(settings{"maxPending": 1, "rejectOnRecordError": true}), "exchange.maxPending: with exchange.rejectOnRecordError no record can be left pending",
		},
		"file that is not there": {
			exchange(settings{"headers": settings{"Authorization": "file:/there/is/none"}}), "exchange.headers: Authorization: open /there/is/none: no such file or directory",
		},
		"header of the tap itself": {
			exchange(settings{"headers": settings{"content-type": "text/plain"}}), "exchange.headers: content-type is set by the tap itself",
		},
		"value of another type": {
			exchange(settings{"recordBody": "sometimes"}),
			cannotDecode + `cannot parse 'Exchange.RecordBody' as bool: strconv.ParseBool: parsing "sometimes": invalid syntax`,
		},
		"block without a name": {
			settings{"exchange": someURL}, cannotDecode + "'Exchange' expected a map, got 'string'",
		},
	}

	for name, test := range cases {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()

			_, err := build(ctx, http.NotFoundHandler(), test.config, "audit@file")

			assert.EqualError(t, err, test.want)
		})
	}
}

func TestTap_TellsNoSecretInAnError(t *testing.T) {
	const secret = "s3cret"
	cases := map[string]settings{
		"URL":    {"service": "http://user:" + secret + "@:9000:9000"},
		"header": {"service": someURL, "headers": settings{"Authorization": secret + "\n"}},
		"key":    {"service": "https://endpoint.example", "tls": settings{"cert": "c", "key": secret}},
	}

	for name, kind := range cases {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()

			_, err := build(ctx, http.NotFoundHandler(), settings{"exchange": kind}, "audit@file")

			assert.ErrorContains(t, err, "exchange.")
			assert.NotContains(t, err.Error(), secret)
		})
	}
}
