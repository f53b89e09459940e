//! The kernels without a GPU: their source runs on the host, a thread after the other, and the compiled text is that of
//! this source.

use std::{fmt::Write as _, fs, process::Command};

use twox_hash::XxHash3_64;

/// What the source needs of CUDA, and a program that hashes and copies pages of several sizes with it.
const HOST: &str = r#"
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#define __global__
#define __device__
#define __shared__ static
#define __constant__ static const
struct Three { unsigned x; };
static Three blockIdx, blockDim, threadIdx;
struct uint4 { unsigned a, b, c, d; };
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
static void __syncthreads() {}
#include "pages.cu"
int main(int count, char** sizes) {
    for (int i = 1; i < count; i++) {
        const u64 bytes = strtoull(sizes[i], nullptr, 10);
        unsigned char* from = (unsigned char*)aligned_alloc(16, bytes);
        unsigned char* to = (unsigned char*)aligned_alloc(16, bytes);
        for (u64 at = 0; at < bytes; at++) from[at] = (unsigned char)(at * 31 + (at >> 8) * 7 + 3);
        Page page = {(u64)from, (u64)to, bytes};
        u64 sums[8];
        for (u32 lane = 0; lane < 8; lane++) sums[lane] = lane_sum(page, lane);
        bool same = true;
        for (u32 slices : {1u, 3u, 8u}) {
            memset(to, 0, bytes);
            blockDim.x = 32;
            for (blockIdx.x = 0; blockIdx.x < slices; blockIdx.x++)
                for (threadIdx.x = 0; threadIdx.x < 32; threadIdx.x++) copy_pages(&page, slices);
            same = same && memcmp(from, to, bytes) == 0;
        }
        printf("%llu %016llx %d\n", bytes, merged(sums, bytes), same);
    }
}
"#;

const SIZES: [usize; 12] = [256, 272, 512, 1008, 1024, 1040, 2048, 4096, 16_384, 16_400, 65_600, 1 << 20];

#[test]
fn kernels_copy_every_byte_and_hash_as_the_host_does() {
    if Command::new("c++").arg("--version").output().is_err() {
        eprintln!("no c++ here: the kernels were not run on the host");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("host.cpp"), folder.path().join("host"));
    fs::write(folder.path().join("pages.cu"), starling_cuda::SOURCE).unwrap();
    fs::write(&source, HOST).unwrap();
    let built = Command::new("c++").args(["-O1", "-w", "-o"]).arg(&program).arg(&source).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let ran = Command::new(&program).args(SIZES.map(|size| size.to_string())).output().unwrap();
    let expected = SIZES.iter().fold(String::new(), |mut text, size| {
        let bytes: Vec<u8> = (0..*size).map(|at| (at * 31 + (at >> 8) * 7 + 3) as u8).collect();
        writeln!(text, "{size} {:016x} 1", XxHash3_64::oneshot(&bytes)).unwrap();
        text
    });
    assert_eq!(String::from_utf8_lossy(&ran.stdout), expected);
}

#[test]
fn the_compiled_kernels_are_those_of_the_source() {
    let sum = format!("// xxh3-64 of pages.cu: {:016x}\n", XxHash3_64::oneshot(starling_cuda::SOURCE.as_bytes()));
    assert!(starling_cuda::PTX.starts_with(&sum), "compile pages.cu again: kv/cuda/README.md says how");
    for kernel in [".entry copy_pages(", ".entry sum_pages("] {
        assert!(starling_cuda::PTX.contains(kernel), "{kernel}");
    }
}
