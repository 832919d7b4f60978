# `make demo` shows what this is for; `make test` runs every test. `make` alone lists the rest.
SHELL := /bin/bash
CLUSTER := tests/cluster

.DEFAULT_GOAL := help
.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## Show three tenants, two of them upgraded, on a cluster brought up here or the one of KUBECONFIG
	@$(CLUSTER)/demo.sh

.PHONY: test
test: ## Run every test, real cluster included (root, Debian 12); ARGS="..." goes to cargo test
	@$(CLUSTER)/test.sh $(ARGS)

.PHONY: measure-fleet
measure-fleet: ## Print what a thousand tenants of the Go manager cost: to take over, and at rest (half an hour)
	@. $(CLUSTER)/env.sh && use_cargo_target && \
	  VCM_FLEET=1000 VCM_FLEET_SECONDS=300 cargo test --locked --test api_adoption -- --nocapture a_fleet

.PHONY: measure
measure: ## Print the manager's figures: API writes, times, memory (needs `make cluster image`)
	@$(CLUSTER)/measure.sh

.PHONY: load
load: ## Measure the webhooks under load, a Go webhook for comparison (COUNT=n reviews; needs `make tools image`)
	@$(CLUSTER)/load.sh

.PHONY: lint
lint: ## Check form: rustfmt, clippy, shellcheck
	@$(CLUSTER)/lint.sh

.PHONY: fuzz
fuzz: ## Fuzz the decoder of reviews and the rules for a minute (SECONDS_=n for longer)
	@$(CLUSTER)/fuzz.sh

.PHONY: audit
audit: ## Check licences and origins of all crates (cargo-deny)
	@$(CLUSTER)/audit.sh

.PHONY: packages
packages: ## Install the Debian packages the cluster needs (root, Debian 12)
	@$(CLUSTER)/packages.sh

.PHONY: tools
tools: ## Build Kubernetes, etcd, CoreDNS and crane from their Go modules (cached)
	@$(CLUSTER)/build-tools.sh

.PHONY: images
images: ## Pack the images of the cluster and its tenants (cached)
	@$(CLUSTER)/images.sh

.PHONY: image
image: ## Build vc-manager's own container image
	@$(CLUSTER)/image.sh

# One after the other, also under `make -j`.
.PHONY: cluster
cluster: ## Bring up a one-node Kubernetes on this machine (root, Debian 12)
	@$(CLUSTER)/packages.sh
	@$(CLUSTER)/build-tools.sh
	@$(CLUSTER)/images.sh
	@$(CLUSTER)/up.sh

.PHONY: down
down: ## Remove all that `make demo` and `make cluster` made, except the cache
	@$(CLUSTER)/demo/down.sh

.PHONY: logs
logs: ## Show the end of the cluster's logs (COMPONENT=kubelet for one)
	@$(CLUSTER)/logs.sh $(COMPONENT)
