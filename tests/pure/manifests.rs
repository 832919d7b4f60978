//! What is checked in equals what the program prints.

use std::{fs, path::Path};

#[test]
fn the_definitions_under_charts_are_those_of_the_types() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("charts/vc-manager/crds/tenancy.x-k8s.io.yaml");
    let checked_in = fs::read_to_string(&path).unwrap_or_default();
    let printed = vc_manager::api::crds_yaml().expect("they can be written as YAML");
    assert!(
        checked_in == printed,
        "{} differs from the types: run `cargo run -- crds > {0}`",
        path.display()
    );
}

#[test]
fn the_definitions_say_what_they_must() {
    let [cluster_version, virtual_cluster] = vc_manager::api::crd::crds();
    for crd in [&cluster_version, &virtual_cluster] {
        let version = &crd.spec.versions[0];
        assert_eq!(
            (crd.spec.group.as_str(), version.name.as_str()),
            ("tenancy.x-k8s.io", "v1alpha1")
        );
        assert!(version.served && version.storage);
        assert!(
            version
                .subresources
                .as_ref()
                .is_some_and(|sub| sub.status.is_some())
        );
    }
    assert_eq!(cluster_version.spec.scope, "Cluster");
    assert_eq!(
        cluster_version.spec.names.short_names,
        Some(vec!["cv".to_owned()])
    );
    assert_eq!(virtual_cluster.spec.scope, "Namespaced");
    assert_eq!(
        virtual_cluster.spec.names.short_names,
        Some(vec!["vc".to_owned()])
    );
    let columns: Vec<_> = virtual_cluster.spec.versions[0]
        .additional_printer_columns
        .iter()
        .flatten()
        .map(|column| column.name.as_str())
        .collect();
    // The first three are those of the Go manager, in its order.
    assert_eq!(columns[..3], ["Age", "Phase", "ClusterVersion"]);
    assert!(columns.contains(&"ClusterNamespace"));
}
