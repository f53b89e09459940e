// Copies and hashes pages of KV blocks. Compiled to pages.ptx (compute_80); see kv/cuda/README.md for the command.
//
// Addresses may be those of device memory, of another process's device memory, or of pinned host memory: all lie in one
// address space. Every page starts at a multiple of 16 bytes and has a multiple of 16 bytes; the host checks that.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Page {
    u64 from;  // address of the first byte to read
    u64 to;    // address of the first byte to write; sums do not look at it
    u64 bytes; // a multiple of 16
};

// Each page is cut into `slices` parts of nearly the same size and each part is one thread block's. Four loads are on
// their way before the first store waits for one.
extern "C" __global__ void copy_pages(const Page* pages, u32 slices) {
    const Page page = pages[blockIdx.x / slices];
    const u64 units = page.bytes / 16;
    const u64 part = (units + slices - 1) / slices;
    const u64 begin = part * (blockIdx.x % slices);
    const u64 end = begin + part < units ? begin + part : units;
    const uint4* from = reinterpret_cast<const uint4*>(page.from);
    uint4* to = reinterpret_cast<uint4*>(page.to);
    const u64 step = blockDim.x;
    u64 at = begin + threadIdx.x;
    for (; at + 3 * step < end; at += 4 * step) {
        const uint4 a = from[at], b = from[at + step], c = from[at + 2 * step], d = from[at + 3 * step];
        to[at] = a;
        to[at + step] = b;
        to[at + 2 * step] = c;
        to[at + 3 * step] = d;
    }
    for (; at < end; at += step) to[at] = from[at];
}

// xxh3-64 with seed 0 and the default secret, for pages of more than 240 bytes: the same sums as on the host. Format:
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md. Eight lanes of a warp hash one page, one accumulator
// each; the constants are the secret's 64-bit words at the offsets that the format names.

__constant__ u64 STRIPE_KEYS[24] = { // at 0, 8, 16 ...: stripe s of a 1,024-byte block takes 8 from s on
    0xbe4ba423396cfeb8ULL, 0x1cad21f72c81017cULL, 0xdb979083e96dd4deULL, 0x1f67b3b7a4a44072ULL,
    0x78e5c0cc4ee679cbULL, 0x2172ffcc7dd05a82ULL, 0x8e2443f7744608b8ULL, 0x4c263a81e69035e0ULL,
    0xcb00c391bb52283cULL, 0xa32e531b8b65d088ULL, 0x4ef90da297486471ULL, 0xd8acdea946ef1938ULL,
    0x3f349ce33f76faa8ULL, 0x1d4f0bc7c7bbdcf9ULL, 0x3159b4cd4be0518aULL, 0x647378d9c97e9fc8ULL,
    0xc3ebd33483acc5eaULL, 0xeb6313faffa081c5ULL, 0x49daf0b751dd0d17ULL, 0x9e68d429265516d3ULL,
    0xfca1477d58be162bULL, 0xce31d07ad1b8f88fULL, 0x280416958f3acb45ULL, 0x7e404bbbcafbd7afULL
};
__constant__ u64 LAST_KEYS[8] = { // at 121
    0xea647378d9c97e9fULL, 0xc5c3ebd33483acc5ULL, 0x17eb6313faffa081ULL, 0xd349daf0b751dd0dULL,
    0x2b9e68d429265516ULL, 0x8ffca1477d58be16ULL, 0x45ce31d07ad1b8f8ULL, 0xaf280416958f3acbULL
};
__constant__ u64 MERGE_KEYS[8] = { // at 11
    0x6dd4de1cad21f72cULL, 0xa44072db979083e9ULL, 0xe679cb1f67b3b7a4ULL, 0xd05a8278e5c0cc4eULL,
    0x4608b82172ffcc7dULL, 0x9035e08e2443f774ULL, 0x52283c4c263a81e6ULL, 0x65d088cb00c391bbULL
};
__constant__ u64 SEEDS[8] = {
    0x00000000C2B2AE3DULL, 0x9E3779B185EBCA87ULL, 0xC2B2AE3D27D4EB4FULL, 0x165667B19E3779F9ULL,
    0x85EBCA77C2B2AE63ULL, 0x0000000085EBCA77ULL, 0x27D4EB2F165667C5ULL, 0x000000009E3779B1ULL,
};

__device__ static void stripe(u64& sum, const u64* words, u32 lane, u64 key) {
    const u64 mixed = words[lane] ^ key;
    sum += words[lane ^ 1] + (mixed & 0xFFFFFFFFULL) * (mixed >> 32);
}

__device__ static u64 lane_sum(const Page& page, u32 lane) {
    const u64* words = reinterpret_cast<const u64*>(page.from);
    const u64 blocks = (page.bytes - 1) / 1024;
    u64 sum = SEEDS[lane];
    for (u64 block = 0; block < blocks; block++) {
        for (u32 s = 0; s < 16; s++) stripe(sum, words + block * 128 + s * 8, lane, STRIPE_KEYS[s + lane]);
        sum = (sum ^ (sum >> 47) ^ STRIPE_KEYS[16 + lane]) * 0x9E3779B1ULL;
    }
    const u32 left = static_cast<u32>((page.bytes - 1 - blocks * 1024) / 64);
    for (u32 s = 0; s < left; s++) stripe(sum, words + blocks * 128 + s * 8, lane, STRIPE_KEYS[s + lane]);
    stripe(sum, words + (page.bytes - 64) / 8, lane, LAST_KEYS[lane]);
    return sum;
}

__device__ static u64 merged(const u64* sums, u64 bytes) {
    u64 hash = bytes * 0x9E3779B185EBCA87ULL;
    for (u32 pair = 0; pair < 8; pair += 2) {
        const u64 a = sums[pair] ^ MERGE_KEYS[pair], b = sums[pair + 1] ^ MERGE_KEYS[pair + 1];
        hash += (a * b) ^ __umul64hi(a, b);
    }
    hash = (hash ^ (hash >> 37)) * 0x165667919E3779F9ULL;
    return hash ^ (hash >> 32);
}

// 32 pages for each thread block of 256 threads.
extern "C" __global__ void sum_pages(const Page* pages, u32 count, u64* sums) {
    __shared__ u64 lanes[256];
    const u32 page = blockIdx.x * 32 + threadIdx.x / 8;
    if (page < count) lanes[threadIdx.x] = lane_sum(pages[page], threadIdx.x % 8);
    __syncthreads();
    if (page < count && threadIdx.x % 8 == 0) sums[page] = merged(lanes + threadIdx.x, pages[page].bytes);
}
