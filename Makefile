# Two commands for most: `make cluster` and `make down`. `make` alone lists the rest.
SHELL := /bin/bash
CLUSTER := tests/cluster
SCRIPTS := $(wildcard $(CLUSTER)/*.sh)

.DEFAULT_GOAL := help
.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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
down: ## Remove everything `make cluster` made, except the cache
	@$(CLUSTER)/down.sh

.PHONY: logs
logs: ## Show the end of the cluster's logs (COMPONENT=kubelet for one)
	@$(CLUSTER)/logs.sh $(COMPONENT)

.PHONY: lint
lint: ## Check the scripts
	@shellcheck -x --source-path=SCRIPTDIR $(SCRIPTS)
