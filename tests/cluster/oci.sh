# shellcheck shell=bash
# Packs container images without a container engine. Sourced by images.sh and image.sh; defines functions only.
# An image here is an OCI layout folder of one layer, the same to the byte for the same input.

# add_blob LAYOUT FILE: moves a file into the layout under its digest; prints "digest size".
add_blob() {
  local digest size
  digest=$(sha256sum "$2")
  digest=${digest%% *}
  size=$(stat -c %s "$2")
  mv "$2" "$1/blobs/sha256/$digest"
  echo "$digest $size"
}

# pack_image LAYOUT REFERENCE ROOT CONFIG [gzip]: the tree ROOT becomes the one layer of an image with the
# runtime configuration CONFIG (JSON: Entrypoint, User, Env...). LAYOUT appears complete or not at all.
pack_image() {
  local layout=$1 reference=$2 root=$3 config=$4 compress=${5:-}
  local new=$1.new media=application/vnd.oci.image.layer.v1.tar
  local diff_id config_digest config_size layer_digest layer_size manifest_digest manifest_size
  rm -rf "$new"
  mkdir -p "$new/blobs/sha256"
  tar -C "$root" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --format=gnu -cf "$new/layer" .
  diff_id=$(sha256sum "$new/layer")
  diff_id=${diff_id%% *}
  if [ "$compress" = gzip ]; then
    gzip -n -9 -S .gz "$new/layer"
    mv "$new/layer.gz" "$new/layer"
    media+=+gzip
  fi
  read -r layer_digest layer_size < <(add_blob "$new" "$new/layer")

  jq -cn --argjson config "$config" --arg diff "sha256:$diff_id" '{
    architecture: "amd64", os: "linux", created: "1970-01-01T00:00:00Z",
    config: $config, rootfs: {type: "layers", diff_ids: [$diff]},
    history: [{created: "1970-01-01T00:00:00Z", created_by: "vc-manager tests/cluster"}]}' >"$new/config"
  read -r config_digest config_size < <(add_blob "$new" "$new/config")

  jq -cn --arg media "$media" --arg layer "sha256:$layer_digest" --argjson layer_size "$layer_size" \
    --arg config "sha256:$config_digest" --argjson config_size "$config_size" '{
    schemaVersion: 2, mediaType: "application/vnd.oci.image.manifest.v1+json",
    config: {mediaType: "application/vnd.oci.image.config.v1+json", digest: $config, size: $config_size},
    layers: [{mediaType: $media, digest: $layer, size: $layer_size}]}' >"$new/manifest"
  read -r manifest_digest manifest_size < <(add_blob "$new" "$new/manifest")

  # The two annotations are what containerd and other engines name the image by on import.
  jq -cn --arg manifest "sha256:$manifest_digest" --argjson size "$manifest_size" --arg reference "$reference" '{
    schemaVersion: 2, mediaType: "application/vnd.oci.image.index.v1+json",
    manifests: [{mediaType: "application/vnd.oci.image.manifest.v1+json", digest: $manifest, size: $size,
      platform: {architecture: "amd64", os: "linux"},
      annotations: {"io.containerd.image.name": $reference, "org.opencontainers.image.ref.name": $reference}}]}' \
    >"$new/index.json"
  echo '{"imageLayoutVersion":"1.0.0"}' >"$new/oci-layout"
  # For `docker load`, which reads this file instead of the index.
  jq -cn --arg config "blobs/sha256/$config_digest" --arg layer "blobs/sha256/$layer_digest" --arg reference "$reference" \
    '[{Config: $config, RepoTags: [$reference], Layers: [$layer]}]' >"$new/manifest.json"
  echo "$reference" >"$new.reference"

  rm -rf "$layout"
  mv "$new" "$layout"
  mv "$new.reference" "$layout.reference"
}

# push_image LAYOUT: into the loopback registry, under the name it was packed with. Blobs the registry has
# already are not sent again.
push_image() {
  local reference log=$VCM_CACHE/images/push.log
  reference=$(<"$1.reference")
  # Only ever to loopback: the registry is not asked for by the name the image carries.
  "$VCM_CRANE" push --insecure "$1" "$VCM_REGISTRY/${reference#*/}" >"$log" 2>&1 ||
    fail_with_log images "$reference could not be pushed to $VCM_REGISTRY" "$log"
}

# import_image LAYOUT: straight into the node's containerd, so that the first pod does not wait for a pull.
import_image() {
  tar -C "$1" -cf - . | ctr -a "$VCM_CONTAINERD" -n k8s.io images import -
}
