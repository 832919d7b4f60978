//! Volumes of Secrets, written as the kubelet writes them: a folder per content, and links that are moved at once.

use std::{fs, os::unix::fs::symlink, path::PathBuf};

use vc_manager::pki::CertifiedPair;

/// What a volume holds: text by name of the file.
pub(crate) type Files = Vec<(&'static str, String)>;

/// A mounted Secret whose content is replaced once.
pub(crate) struct Volume {
    dir: PathBuf,
    /// The certificate or key that it holds at first, and the later one.
    pub(crate) old: CertifiedPair,
    pub(crate) new: CertifiedPair,
    later: Files,
}

impl Volume {
    /// One in a folder that does not exist yet, with the files that `content` makes of the pair.
    pub(crate) fn mount(
        dir: PathBuf,
        old: CertifiedPair,
        new: CertifiedPair,
        content: impl Fn(&CertifiedPair) -> Files,
    ) -> Self {
        fs::create_dir(&dir).unwrap();
        let (now, later) = (content(&old), content(&new));
        let volume = Self { dir, old, new, later };
        volume.write("..old", &now);
        for (name, _) in &now {
            symlink(format!("..data/{name}"), volume.dir.join(name)).unwrap();
        }
        volume
    }

    /// Path of a file.
    pub(crate) fn file(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    /// The kubelet hears that the Secret has changed.
    pub(crate) fn replace(&self) {
        self.write("..new", &self.later);
        fs::remove_dir_all(self.dir.join("..old")).unwrap();
    }

    fn write(&self, folder: &str, files: &Files) {
        fs::create_dir(self.dir.join(folder)).unwrap();
        for (name, text) in files {
            fs::write(self.dir.join(folder).join(name), text).unwrap();
        }
        let link = self.dir.join("..data_tmp");
        symlink(folder, &link).unwrap();
        fs::rename(link, self.dir.join("..data")).unwrap();
    }
}

/// The two files of a pair.
pub(crate) fn pair(pair: &CertifiedPair) -> Files {
    vec![
        ("tls.crt", pair.certificate_pem.clone()),
        ("tls.key", pair.key_pem.to_string()),
    ]
}
